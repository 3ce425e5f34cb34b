//! Values to the host, as they are: samples, and tensors that are too small for chunks of their own.

use s4_codec_gpu::GpuError;
use s4_codec_gpu::abi::{COPY_SPAN_BYTES, CopySpan};

use super::error::{CudaError, Result};
use super::worker::{Session, Worker};
use crate::DeviceMemory;

const SPAN: usize = size_of::<CopySpan>();

/// Items of one batch: their numbers, and where each lies.
#[derive(Default)]
struct Batch {
    items: Vec<(usize, usize, usize)>,
    /// For each session its spans; `to` counts from the start of the slot's frames.
    spans: Vec<Vec<CopySpan>>,
    bytes: u64,
}

pub(super) fn run<E: From<CudaError>>(
    sessions: &[Session<'_>],
    items: &[Vec<DeviceMemory>],
    mut sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
) -> Result<(), E> {
    // Every device has a slot of the same size: an item has one place in all of them.
    let sizes = sessions.iter().map(|s| s.sizes);
    let Some(sizes) = sizes.min_by_key(|s| s.frames) else {
        return items.iter().enumerate().try_for_each(|(i, _)| sink(&[(i, &[])]));
    };
    let mut batch = Batch::default();
    for (number, parts) in items.iter().enumerate() {
        let bytes: u64 = parts.iter().map(DeviceMemory::bytes).sum();
        let spans = parts.iter().map(|p| p.bytes().div_ceil(COPY_SPAN_BYTES)).sum::<u64>();
        let room = |batch: &Batch| {
            let most = batch.spans.iter().map(Vec::len).max().unwrap_or(0) as u64;
            batch.bytes + bytes <= sizes.frames && (most + spans) * SPAN as u64 <= sizes.meta
        };
        if !room(&batch) {
            hand_on(sessions, &std::mem::take(&mut batch), &mut sink)?;
        }
        if !room(&batch) {
            let (what, budget) = ("an item to be fetched", sizes.frames);
            return Err(CudaError::from(GpuError::Budget { what, needed: bytes, budget }).into());
        }
        add(&mut batch, sessions, number, parts);
    }
    hand_on(sessions, &batch, &mut sink)
}

fn add(batch: &mut Batch, sessions: &[Session<'_>], number: usize, parts: &[DeviceMemory]) {
    batch.spans.resize_with(sessions.len(), Vec::new);
    let start = batch.bytes;
    for part in parts {
        let own = sessions.iter().position(|s| s.worker.device.ordinal() == part.ordinal());
        let mut done = 0;
        while let (Some(own), true) = (own, done < part.bytes()) {
            let len = COPY_SPAN_BYTES.min(part.bytes() - done);
            let from = part.address() + done;
            batch.spans[own].push(CopySpan { from, to: batch.bytes, len });
            batch.bytes += len;
            done += len;
        }
    }
    batch.items.push((number, start as usize, (batch.bytes - start) as usize));
    // The next item starts where copies are fast.
    batch.bytes = batch.bytes.next_multiple_of(16);
}

/// Copies a batch and calls the sink. Parts of an item may lie on several devices.
fn hand_on<E: From<CudaError>>(
    sessions: &[Session<'_>],
    batch: &Batch,
    sink: &mut impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
) -> Result<(), E> {
    if batch.items.is_empty() {
        return Ok(());
    }
    for (session, spans) in sessions.iter().zip(&batch.spans) {
        start(session, spans)?;
    }
    for session in sessions {
        session.worker.compute.synchronize().map_err(CudaError::from)?;
    }
    let joined;
    let bytes = match sessions {
        // SAFETY: the copies into the slot are done.
        [session] => unsafe { session.worker.slots[0].pinned.slice(0, batch.bytes as usize) },
        _ => {
            joined = join(sessions, batch);
            &joined
        }
    };
    let items = batch.items.iter().map(|&(n, at, len)| (n, &bytes[at..at + len]));
    sink(&items.collect::<Vec<_>>())
}

/// The bytes of a batch from the slots of several devices.
fn join(sessions: &[Session<'_>], batch: &Batch) -> Vec<u8> {
    let mut bytes = vec![0u8; batch.bytes as usize];
    for (session, spans) in sessions.iter().zip(&batch.spans) {
        for span in spans {
            let (at, len) = (span.to as usize, span.len as usize);
            // SAFETY: the copies into the slots are done.
            let from = unsafe { session.worker.slots[0].pinned.slice(at, len) };
            bytes[at..at + len].copy_from_slice(from);
        }
    }
    bytes
}

/// Queues the copies of one device.
fn start(session: &Session<'_>, spans: &[CopySpan]) -> Result<()> {
    let Some(last) = spans.last() else { return Ok(()) };
    let Worker { compute, slots, .. } = &*session.worker;
    let (frames, meta) = (session.frames(0), session.meta(0));
    let (pinned, at) = (&slots[0].pinned, session.pinned_meta());
    // SAFETY: nothing is in flight: every batch is waited for.
    let to = unsafe { pinned.slice_mut(at, spans.len() * SPAN) };
    for (to, span) in to.chunks_exact_mut(SPAN).zip(spans) {
        let span = CopySpan { to: frames + span.to, ..*span };
        to.copy_from_slice(bytemuck::bytes_of(&span));
    }
    // At most what fits the slot's memory for descriptors.
    let count = u32::try_from(spans.len()).unwrap_or(u32::MAX);
    let end = (last.to + last.len) as usize;
    // SAFETY: the spans are parts of the caller's memory and of the slot's frames, side by side.
    unsafe {
        compute.copy_to_device(pinned, at, spans.len() * SPAN, meta)?;
        // Gaps between items are copied to the host, too.
        compute.fill(frames, 0, end as u64)?;
        compute.copy_spans(meta, count)?;
        compute.copy_to_host(frames, pinned, 0, end)?;
    }
    Ok(())
}
