//! The trait of codecs that work on blocks in device memory.

use std::fmt::Debug;

use nvcomp_sys::{Alignments, Compress, Decompress, Shape};
use s4_format::CodecId;
use s4_format::manifest::ClosedCodec;

use super::error::Result;

/// The scratch memory and the alignments that a batch needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of scratch memory.
    pub scratch: usize,
    /// Alignment of every block's input and output, and of the scratch memory: 1 to 16 bytes.
    pub alignments: Alignments,
}

impl Needs {
    /// Whether memory at multiples of `align` bytes meets all alignments.
    pub fn fit(&self, align: usize) -> bool {
        let Alignments { input, output, scratch } = self.alignments;
        [input, output, scratch].iter().all(|a| *a != 0 && align.is_multiple_of(*a))
    }
}

/// One bitstream, coded in batches of blocks on a GPU: stream-ordered, without allocating or waiting.
///
/// A block is at most [`Self::block`] bytes of a plane, and a multiple of [`Self::unit`].
pub trait GpuCodec: Debug + Send + Sync {
    /// The bitstream's id.
    fn id(&self) -> CodecId;

    /// The parameter that goes into the stream's entry.
    fn param(&self) -> u8;

    /// Bytes of a plane in each block but the last.
    fn block(&self) -> usize;

    /// Every block's size before coding is a multiple of this: a plane of any other size is not for
    /// this codec.
    fn unit(&self) -> usize;

    /// The entry that the manifest must list if this codec is used: `None` for open bitstreams.
    fn closed(&self) -> Option<ClosedCodec>;

    /// The most bytes that a block of `len` bytes is coded in: the room to give to each output.
    ///
    /// # Errors
    /// `Block` if the codec has no such blocks; errors of the library.
    fn bound(&self, len: usize) -> Result<usize>;

    /// The memory that encoding such a batch needs. The device of `stream`, a `CUstream`, must be
    /// current on this thread; nothing is enqueued.
    ///
    /// # Errors
    /// `Block` if the codec has no such blocks; errors of the library.
    fn encode_needs(&self, shape: Shape, stream: u64) -> Result<Needs>;

    /// The memory that decoding such a batch needs; as [`Self::encode_needs`].
    ///
    /// # Errors
    /// As [`Self::encode_needs`].
    fn decode_needs(&self, shape: Shape, stream: u64) -> Result<Needs>;

    /// Enqueues the encoding of a batch. When the stream is done, the arrays hold the sizes and,
    /// if asked for, the statuses: a status other than success means that the block's output is void.
    ///
    /// # Errors
    /// `Scratch` if there is too little scratch memory; errors of the library.
    ///
    /// # Safety
    /// - `stream` is of the context that is current on this thread;
    /// - all that `batch` names is device-accessible memory of the sizes that its fields' documentation
    ///   says, aligned as [`Self::encode_needs`] says, with `shape.blocks` entries in each array;
    /// - no block is longer than `shape.max_block`, and every output has [`Self::bound`] of that;
    /// - all of it stays valid, and what is written is not touched, until the stream is done.
    unsafe fn encode(&self, shape: Shape, batch: Compress, stream: u64) -> Result<()>;

    /// Enqueues the decoding of a batch, as [`Self::encode`]. A success status and the expected size are necessary
    /// but no proof: with nvCOMP 6.0, ANS was seen to report success for half a block, and LZ4 for a damaged one. The
    /// checksum of the values decides. (Bitcomp waits for the stream in this call.)
    ///
    /// # Errors
    /// As [`Self::encode`].
    ///
    /// # Safety
    /// As for [`Self::encode`], aligned as [`Self::decode_needs`] says; and the blocks are what an
    /// encoder of this bitstream wrote: see the module's documentation on trust.
    unsafe fn decode(&self, shape: Shape, batch: Decompress, stream: u64) -> Result<()>;
}
