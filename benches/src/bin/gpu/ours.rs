//! The project's kernels on a batch of chunks in device memory.

use bytemuck::Zeroable;
use s4_codec_gpu::abi::{self, DecodeChunk, DecodeStream, EncodeChunk, EncodeResult, Route};
use s4_codec_gpu::{DecodeBatch, DeviceBuffer, EncodeBatch};
use s4_format::LayoutId;

use crate::Tile;
use crate::lab::{Lab, Outcome};
use crate::report::Group;

/// Bytes of the values of a chunk, as in the engine.
const CHUNK: u64 = 1 << 18;

/// Bytes that a file stores for each chunk besides its frame.
const RECORD: u64 = 24;

pub(crate) fn measure(
    lab: &Lab,
    tile: &Tile,
    values: &DeviceBuffer,
    back: &DeviceBuffer,
    group: &mut Group,
) -> Outcome<()> {
    let width = tile.dtype.value_width();
    let route = Route::fused(width).ok_or("no fused kernels for this dtype")?;
    let count = values.bytes().div_ceil(CHUNK);
    let mut routes = [0; 6];
    routes[route as usize] = u32::try_from(count)?;
    let n = CHUNK / width as u64;
    let scratch = abi::encode_scratch(route, n, width as u64, n, false)
        + (n * (width as u64 - 1)).next_multiple_of(32);
    let scratch_memory = lab.alloc(count * scratch)?;
    let chunks: Vec<_> = (0..count)
        .map(|i| encode_chunk(width, values, i, scratch_memory.address() + i * scratch))
        .collect();
    let chunks_there = lab.upload(bytemuck::cast_slice(&chunks))?;
    let results = lab.alloc(count * size_of::<EncodeResult>() as u64)?;
    let total = lab.alloc(8)?;
    let frames = lab.alloc(values.bytes())?;
    let batch = EncodeBatch {
        chunks: chunks_there.address(),
        results: results.address(),
        total: total.address(),
        frames: frames.address(),
        capacity: frames.bytes(),
        routes,
    };
    // Leaves everything that would be stored in slots, raw planes included, as other libraries do.
    let mut keeping = chunks.clone();
    keeping.iter_mut().for_each(|c| c.flags = abi::KEEP_PLANES);
    let keeping = lab.upload(bytemuck::cast_slice(&keeping))?;
    let in_slots = EncodeBatch { chunks: keeping.address(), ..batch };
    // SAFETY: all memory belongs to this function, has the sizes that abi.h requires, and is used by one
    // stream.
    let slots = lab.time(|| Ok(unsafe { lab.stream.encode_streams(&in_slots, &[]) }?))?;
    // SAFETY: as above.
    let whole = lab.time(|| Ok(unsafe { lab.stream.encode(&batch, &[]) }?))?;
    let done = lab.download(&results, count as usize * size_of::<EncodeResult>())?;
    let done: Vec<EncodeResult> =
        done.chunks_exact(size_of::<EncodeResult>()).map(bytemuck::pod_read_unaligned).collect();
    if done.iter().any(|r| u32::from(r.status) != abi::status::OK) {
        return Err("a chunk was refused".into());
    }
    let stored: u64 = done.iter().map(|r| u64::from(r.len) + RECORD).sum();
    let ratio = values.bytes() as f64 / stored as f64;

    let chunks: Vec<_> = chunks
        .iter()
        .zip(&done)
        .enumerate()
        .map(|(i, (c, r))| decode_chunk(c, r, &frames, back.address() + i as u64 * CHUNK))
        .collect();
    let chunks_there = lab.upload(bytemuck::cast_slice(&chunks))?;
    let status = lab.alloc(4 * count)?;
    let [a, b, c, d, e, _] = routes;
    let routes = [a, b, c, d, e];
    let batch = DecodeBatch { chunks: chunks_there.address(), status: status.address(), routes };
    // SAFETY: as above.
    unsafe {
        lab.stream.fill(back.address(), 0xa5, back.bytes())?;
        lab.stream.fill(status.address(), 0, status.bytes())?;
    }
    // SAFETY: as above.
    let bare = lab.time(|| Ok(unsafe { lab.stream.decode_streams(&batch, &[]) }?))?;
    // SAFETY: as above.
    let checked = lab.time(|| Ok(unsafe { lab.stream.decode(&batch, &[]) }?))?;
    let status = lab.download(&status, 4 * count as usize)?;
    if status.iter().any(|b| *b != 0) || !lab.holds(back, &tile.data)? {
        return Err("decoded values differ".into());
    }
    group.row(
        "s4weights, planes and streams in slots; unchecked",
        Some(slots),
        Some(bare),
        Some(ratio),
    );
    group.row("s4weights, frames in order with checksums", Some(whole), Some(checked), Some(ratio));
    Ok(())
}

fn encode_chunk(width: usize, values: &DeviceBuffer, i: u64, scratch: u64) -> EncodeChunk {
    let bytes = CHUNK.min(values.bytes() - i * CHUNK);
    let mut coding = [abi::coding::RAW; abi::MAX_PLANES];
    coding[0] = abi::coding::RANS8;
    EncodeChunk {
        values: values.address() + i * CHUNK,
        scratch,
        // At most the values of one chunk.
        n: (bytes / width as u64) as u32,
        width: width as u8,
        layout: LayoutId::FIELDS.0,
        coding,
        ..EncodeChunk::zeroed()
    }
}

fn decode_chunk(c: &EncodeChunk, r: &EncodeResult, frames: &DeviceBuffer, to: u64) -> DecodeChunk {
    let mut streams = [DecodeStream::default(); abi::MAX_PLANES];
    let mut at = (8 * u32::from(r.streams)).next_multiple_of(16);
    for (to, from) in streams.iter_mut().zip(&r.stream[..usize::from(r.streams)]) {
        let (codec, param, len) = (from.codec, from.param, from.len);
        *to = DecodeStream { offset: at, len, codec, param, reserved: 0 };
        at += len.next_multiple_of(16);
    }
    DecodeChunk {
        frame: frames.address() + r.offset,
        values: to,
        frame_len: r.len,
        n: c.n,
        width: c.width,
        layout: c.layout,
        plain: r.plain,
        planes: r.streams,
        crc_encoded: r.crc_encoded,
        crc_raw: r.crc_raw,
        streams,
        ..DecodeChunk::zeroed()
    }
}
