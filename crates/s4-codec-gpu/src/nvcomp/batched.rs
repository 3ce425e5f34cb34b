//! Every format of nvCOMP as a [`GpuCodec`].

use std::fmt::Debug;
use std::sync::Arc;

use nvcomp_sys::{
    AnsCompress, AnsDecompress, Api, Backend, BitcompCompress, CascadedCommon, CascadedCompress,
    CascadedDecompress, Compress, DataType, Decompress, Lz4Compress, Lz4Decompress, NoOptions,
    Nvcomp, PlainDecompress, Shape, SortingDecompress, WithAlgorithm,
};
use s4_codec_cpu::blocks::BLOCK;
use s4_format::CodecId;
use s4_format::manifest::ClosedCodec;

use super::codec::{GpuCodec, Needs};
use super::error::{Error, Result};

/// Bytes of a plane in each block of ANS, which is faster and smaller with larger blocks.
const ANS_BLOCK: usize = 1 << 18;

/// One format of the library with its options, `C` to encode and `D` to decode.
#[derive(Debug, Clone)]
pub struct Batched<C, D> {
    api: Api<C, D>,
    encode: C,
    decode: D,
    id: CodecId,
    param: u8,
    block: usize,
    unit: usize,
    closed: bool,
    /// Its version goes into the manifest if the bitstream is closed.
    library: Arc<Nvcomp>,
}

impl<C: Copy, D: Copy> Batched<C, D> {
    fn open(library: &Arc<Nvcomp>, id: CodecId, api: Api<C, D>, encode: C, decode: D) -> Self {
        let library = Arc::clone(library);
        Self { api, encode, decode, id, param: 0, block: BLOCK, unit: 1, closed: false, library }
    }

    fn closed(self, unit: usize) -> Self {
        Self { unit, closed: true, ..self }
    }
}

/// `gdeflate`, encoding with an algorithm of 0 (literals only) to 5 (the smallest).
pub fn gdeflate(library: &Arc<Nvcomp>, algorithm: u8) -> Batched<WithAlgorithm, PlainDecompress> {
    let mut encode = WithAlgorithm::default();
    encode.algorithm = i32::from(algorithm);
    Batched::open(library, CodecId::GDEFLATE, *library.gdeflate(), encode, plain())
}

/// `deflate`, encoding with an algorithm of 0 (literals only) to 5 (the smallest).
pub fn deflate(library: &Arc<Nvcomp>, algorithm: u8) -> Batched<WithAlgorithm, SortingDecompress> {
    let mut encode = WithAlgorithm::default();
    encode.algorithm = i32::from(algorithm);
    Batched::open(library, CodecId::DEFLATE, *library.deflate(), encode, sorting())
}

/// `zstd` in blocks.
pub fn zstd(library: &Arc<Nvcomp>) -> Batched<NoOptions, PlainDecompress> {
    let encode = NoOptions::default();
    let codec = Batched::open(library, CodecId::ZSTD, *library.zstd(), encode, plain());
    Batched { param: s4_codec_cpu::Zstd::IN_BLOCKS, ..codec }
}

/// `lz4`.
pub fn lz4(library: &Arc<Nvcomp>) -> Batched<Lz4Compress, Lz4Decompress> {
    let mut decode = Lz4Decompress::default();
    decode.backend = Backend::CUDA;
    Batched::open(library, CodecId::LZ4, *library.lz4(), Lz4Compress::default(), decode)
}

/// `snappy`.
pub fn snappy(library: &Arc<Nvcomp>) -> Batched<NoOptions, SortingDecompress> {
    let encode = NoOptions::default();
    Batched::open(library, CodecId::SNAPPY, *library.snappy(), encode, sorting())
}

/// The type of a plane's values, for ANS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsMode {
    /// Bytes: for exponent planes.
    Bytes,
    /// Whole values of 2 bytes, fp16 or bf16.
    Float16,
    /// Whole values of 4 bytes.
    Float32,
}

impl AnsMode {
    /// The parameter in the stream's entry.
    fn param(self) -> u8 {
        match self {
            Self::Bytes => 0,
            Self::Float16 => 1,
            Self::Float32 => 2,
        }
    }

    fn data_type(self) -> DataType {
        match self {
            Self::Bytes => DataType::UCHAR,
            Self::Float16 => DataType::FLOAT16,
            Self::Float32 => DataType::FLOAT32,
        }
    }
}

/// `nvcomp-ans`, closed.
pub fn ans(library: &Arc<Nvcomp>, mode: AnsMode) -> Batched<AnsCompress, AnsDecompress> {
    let mut encode = AnsCompress::default();
    encode.data_type = mode.data_type();
    let mut decode = AnsDecompress::default();
    decode.backend = Backend::CUDA;
    let codec = Batched::open(library, CodecId::NVCOMP_ANS, *library.ans(), encode, decode)
        .closed(mode.data_type().width());
    Batched { param: mode.param(), block: ANS_BLOCK, ..codec }
}

/// `nvcomp-bitcomp`, closed, for values of the width of `data_type`.
pub fn bitcomp(
    library: &Arc<Nvcomp>,
    data_type: DataType,
) -> Batched<BitcompCompress, PlainDecompress> {
    let mut encode = BitcompCompress::default();
    encode.data_type = data_type;
    Batched::open(library, CodecId::NVCOMP_BITCOMP, *library.bitcomp(), encode, plain())
        .closed(data_type.width())
}

/// `nvcomp-cascaded`, closed, for integers of `data_type`.
pub fn cascaded(
    library: &Arc<Nvcomp>,
    data_type: DataType,
) -> Batched<CascadedCompress, CascadedDecompress> {
    let mut encode = CascadedCompress::default();
    encode.common = CascadedCommon { data_type, ..encode.common };
    let mut decode = CascadedDecompress::default();
    decode.backend = Backend::CUDA;
    Batched::open(library, CodecId::NVCOMP_CASCADED, *library.cascaded(), encode, decode)
        .closed(data_type.width())
}

/// The codec that decodes streams of a bitstream. It encodes with the library's defaults.
///
/// # Errors
/// `NoCodec` if the library has none for this id and parameter.
pub fn reader(library: &Arc<Nvcomp>, id: CodecId, param: u8) -> Result<Box<dyn GpuCodec>> {
    let codec: Box<dyn GpuCodec> = match (id, param) {
        (CodecId::GDEFLATE, 0) => Box::new(gdeflate(library, 1)),
        (CodecId::DEFLATE, 0) => Box::new(deflate(library, 1)),
        (CodecId::ZSTD, s4_codec_cpu::Zstd::IN_BLOCKS) => Box::new(zstd(library)),
        (CodecId::LZ4, 0) => Box::new(lz4(library)),
        (CodecId::SNAPPY, 0) => Box::new(snappy(library)),
        (CodecId::NVCOMP_ANS, 0) => Box::new(ans(library, AnsMode::Bytes)),
        (CodecId::NVCOMP_ANS, 1) => Box::new(ans(library, AnsMode::Float16)),
        (CodecId::NVCOMP_ANS, 2) => Box::new(ans(library, AnsMode::Float32)),
        (CodecId::NVCOMP_BITCOMP, 0) => Box::new(bitcomp(library, DataType::UCHAR)),
        (CodecId::NVCOMP_CASCADED, 0) => Box::new(cascaded(library, DataType::UCHAR)),
        (codec, param) => return Err(Error::NoCodec { codec, param }),
    };
    Ok(codec)
}

/// CUDA kernels decode, because the decompression engine reports no errors.
fn plain() -> PlainDecompress {
    let mut options = PlainDecompress::default();
    options.backend = Backend::CUDA;
    options
}

/// As [`plain`].
fn sorting() -> SortingDecompress {
    let mut options = SortingDecompress::default();
    options.backend = Backend::CUDA;
    options
}

impl<C, D> Batched<C, D> {
    /// Checks that the bitstream has blocks of this size.
    fn check_block(&self, max_block: usize) -> Result<()> {
        if max_block > self.block {
            return Err(Error::Block { codec: self.id, max_block, limit: self.block });
        }
        Ok(())
    }

    fn check_scratch(&self, given: usize, needed: usize) -> Result<()> {
        if given < needed {
            return Err(Error::Scratch { codec: self.id, given, needed });
        }
        Ok(())
    }
}

impl<C, D> GpuCodec for Batched<C, D>
where
    C: Copy + Debug + Send + Sync,
    D: Copy + Debug + Send + Sync,
{
    fn id(&self) -> CodecId {
        self.id
    }

    fn param(&self) -> u8 {
        self.param
    }

    fn block(&self) -> usize {
        self.block
    }

    fn unit(&self) -> usize {
        self.unit
    }

    fn closed(&self) -> Option<ClosedCodec> {
        let library_major = self.library.version().major;
        self.closed.then_some(ClosedCodec { codec: self.id, library_major })
    }

    fn bound(&self, len: usize) -> Result<usize> {
        self.check_block(len)?;
        Ok(self.api.max_compressed(len, self.encode)?)
    }

    fn encode_needs(&self, shape: Shape, stream: u64) -> Result<Needs> {
        self.check_block(shape.max_block)?;
        Ok(Needs {
            scratch: self.api.compress_scratch(shape, self.encode, stream)?,
            alignments: self.api.compress_alignments(self.encode)?,
        })
    }

    fn decode_needs(&self, shape: Shape, stream: u64) -> Result<Needs> {
        self.check_block(shape.max_block)?;
        Ok(Needs {
            scratch: self.api.decompress_scratch(shape, self.decode, stream)?,
            alignments: self.api.decompress_alignments(self.decode)?,
        })
    }

    unsafe fn encode(&self, shape: Shape, batch: Compress, stream: u64) -> Result<()> {
        if shape.blocks == 0 {
            return Ok(()); // the library would launch a grid of nothing, which CUDA refuses
        }
        self.check_scratch(batch.scratch_bytes, self.encode_needs(shape, stream)?.scratch)?;
        // SAFETY: the caller's; the scratch memory was checked.
        Ok(unsafe { self.api.compress(shape, batch, self.encode, stream) }?)
    }

    unsafe fn decode(&self, shape: Shape, batch: Decompress, stream: u64) -> Result<()> {
        if shape.blocks == 0 {
            return Ok(());
        }
        self.check_scratch(batch.scratch_bytes, self.decode_needs(shape, stream)?.scratch)?;
        // SAFETY: the caller's; the scratch memory was checked.
        Ok(unsafe { self.api.decompress(shape.blocks, batch, self.decode, stream) }?)
    }
}
