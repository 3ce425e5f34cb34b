//! nvCOMP's formats on the same values, each in blocks of the size that it is made for.

use std::path::PathBuf;
use std::sync::Arc;

use s4_codec_gpu::DeviceBuffer;
use s4_codec_gpu::nvcomp::{
    self, AnsMode, Compress, DataType, Decompress, GpuCodec, Nvcomp, Search, Shape,
};

use crate::Tile;
use crate::lab::{Lab, Outcome};
use crate::report::Group;

fn open() -> Result<Arc<Nvcomp>, nvcomp::Error> {
    // SAFETY: the library that the environment or the system names is meant to be loaded.
    Ok(Arc::new(unsafe { Nvcomp::open(&Search::new(None::<PathBuf>)) }?))
}

/// Why nvCOMP cannot be measured; `None` if it can.
pub(crate) fn missing() -> Option<String> {
    open().err().map(|e| e.to_string())
}

pub(crate) fn measure(
    lab: &Lab,
    tile: &Tile,
    values: &DeviceBuffer,
    back: &DeviceBuffer,
    group: &mut Group,
) -> Outcome<()> {
    let Ok(library) = open() else { return Ok(()) };
    let (major, minor) = lab.cuda.version();
    library.require_driver(1000 * major + 10 * minor)?;
    let (mode, name, data) = match tile.dtype.value_width() {
        2 => (AnsMode::Float16, "ANS float16", DataType::USHORT),
        _ => (AnsMode::Float32, "ANS float32", DataType::UINT),
    };
    let codecs: [(&str, Box<dyn GpuCodec>); 6] = [
        (name, Box::new(nvcomp::ans(&library, mode))),
        ("ANS uint8", Box::new(nvcomp::ans(&library, AnsMode::Bytes))),
        ("Bitcomp", Box::new(nvcomp::bitcomp(&library, data))),
        ("GDeflate", Box::new(nvcomp::gdeflate(&library, 1))),
        ("Zstd", Box::new(nvcomp::zstd(&library))),
        ("LZ4", Box::new(nvcomp::lz4(&library))),
    ];
    let _current = lab.device.enter()?;
    for (name, codec) in codecs {
        let label =
            format!("nvCOMP {} {name}, blocks of {} KiB", library.version(), codec.block() >> 10);
        match one(lab, codec.as_ref(), tile, values, back) {
            Ok((encode, decode, ratio)) => {
                group.row(&label, Some(encode), Some(decode), Some(ratio));
            }
            // A failure of the library is a result, too.
            Err(e) => group.row(&format!("{label}: {e}"), None, None, None),
        }
    }
    Ok(())
}

/// Seconds to encode and to decode, and the ratio.
fn one(
    lab: &Lab,
    codec: &dyn GpuCodec,
    tile: &Tile,
    values: &DeviceBuffer,
    back: &DeviceBuffer,
) -> Outcome<(f64, f64, f64)> {
    let block = codec.block() as u64;
    let sizes: Vec<u64> = (0..values.bytes().div_ceil(block))
        .map(|i| block.min(values.bytes() - i * block))
        .collect();
    let count = sizes.len();
    let shape = Shape { blocks: count, max_block: codec.block(), total: values.bytes() as usize };
    let room = codec.bound(shape.max_block)?.next_multiple_of(16) as u64;
    let coded = lab.alloc(room * count as u64)?;
    let (inputs, outputs) = (places(lab, values, block, count)?, places(lab, &coded, room, count)?);
    let backs = places(lab, back, block, count)?;
    let sizes = lab.upload(bytemuck::cast_slice(&sizes))?;
    let (coded_sizes, answers) = (lab.alloc(8 * count as u64)?, lab.alloc(8 * count as u64)?);
    let statuses = lab.alloc(4 * count as u64)?;
    let stream = lab.stream.address();

    let scratch = lab.alloc(codec.encode_needs(shape, stream)?.scratch as u64)?;
    let batch = Compress {
        inputs: inputs.address(),
        input_sizes: sizes.address(),
        outputs: outputs.address(),
        output_sizes: coded_sizes.address(),
        scratch: scratch.address(),
        scratch_bytes: scratch.bytes() as usize,
        statuses: statuses.address(),
    };
    // SAFETY: all memory belongs to this function, is as large as the library asked for, and is used
    // by one stream; the device is current.
    let encode = lab.time(|| Ok(unsafe { codec.encode(shape, batch, stream) }?))?;
    let stored = lab.download(&coded_sizes, 8 * count)?;
    let stored: u64 = stored.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>).sum();

    let scratch = lab.alloc(codec.decode_needs(shape, stream)?.scratch as u64)?;
    let batch = Decompress {
        inputs: outputs.address(),
        input_sizes: coded_sizes.address(),
        outputs: backs.address(),
        output_capacities: sizes.address(),
        output_sizes: answers.address(),
        scratch: scratch.address(),
        scratch_bytes: scratch.bytes() as usize,
        statuses: statuses.address(),
    };
    // SAFETY: as above.
    unsafe { lab.stream.fill(back.address(), 0xa5, back.bytes())? };
    // SAFETY: as above; the library wrote the blocks itself.
    let decode = lab.time(|| Ok(unsafe { codec.decode(shape, batch, stream) }?))?;
    if !lab.holds(back, &tile.data)? {
        return Err("decoded values differ".into());
    }
    Ok((encode, decode, values.bytes() as f64 / stored as f64))
}

/// An array, in device memory, of the addresses of blocks.
fn places(lab: &Lab, buffer: &DeviceBuffer, each: u64, count: usize) -> Outcome<DeviceBuffer> {
    let places: Vec<u64> = (0..count as u64).map(|i| buffer.address() + i * each).collect();
    lab.upload(bytemuck::cast_slice(&places))
}
