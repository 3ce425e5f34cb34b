//! Copies values to the host as they are: samples, and tensors that are too small for chunks of their own.

use std::ops::Range;

use s4_codec_gpu::abi::{COPY_ROW_BYTES, COPY_SPAN_BYTES, CopyRows};
use s4_codec_gpu::{GpuError, Stream};

use super::error::{CudaError, Result};
use super::worker::{PLAN_SLOTS, Session, Worker};
use crate::DeviceMemory;

const DESCRIPTOR: usize = size_of::<CopyRows>();
/// The first batch takes this part of a slot: while it is copied, nothing is handed on.
const FIRST: u64 = 8;

/// Ranges of bytes of a device's memory, fetched one after the other: at most 2 MiB in all.
#[derive(Debug, Clone)]
pub struct FetchItem {
    memory: DeviceMemory,
    ranges: Vec<Range<u64>>,
}

impl FetchItem {
    /// Ranges of some memory.
    pub fn of(memory: DeviceMemory, ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        Self { memory, ranges: ranges.into_iter().collect() }
    }

    /// All of some memory.
    pub fn all(memory: DeviceMemory) -> Self {
        Self::of(memory, std::iter::once(0..memory.bytes()))
    }

    pub(super) fn memory(&self) -> DeviceMemory {
        self.memory
    }

    pub(super) fn rows(&self) -> Result<Vec<Rows>> {
        Rows::of(self.memory, 1, self.ranges.iter().cloned())
    }
}

/// Evenly spaced runs of bytes of a device's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    memory: DeviceMemory,
    first: u64,
    len: u64,
    step: u64,
    count: u64,
}

impl Rows {
    /// Ranges of values, which have `width` bytes each.
    ///
    /// # Errors
    /// `Argument` for a range beyond the memory.
    pub(super) fn of(
        memory: DeviceMemory,
        width: u64,
        ranges: impl Iterator<Item = Range<u64>>,
    ) -> Result<Vec<Self>> {
        let mut rows = vec![];
        for range in ranges {
            let bytes = range.start * width..range.end * width;
            if bytes.end > memory.bytes() {
                memory.part(bytes.start, bytes.end - bytes.start)?;
            }
            add_run(&mut rows, memory, bytes);
        }
        Ok(rows)
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.memory.ordinal()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// The first rows, of up to `bytes` bytes but at least one row, and the rest.
    pub(super) fn split(self, bytes: u64) -> (Self, Option<Self>) {
        let count = (bytes / self.len.max(1)).clamp(1, self.count.max(1));
        let rest = self.count.saturating_sub(count);
        let first = self.first + self.step * count;
        (Self { count, ..self }, (rest > 0).then_some(Self { first, count: rest, ..self }))
    }

    /// Rows that one descriptor copies.
    fn at_once(&self) -> u64 {
        (COPY_SPAN_BYTES / self.len.max(1)).max(1)
    }

    pub(super) fn descriptors(&self) -> u64 {
        self.count.div_ceil(self.at_once())
    }
}

/// Adds a run, joining it to the last rows if it continues them.
fn add_run(rows: &mut Vec<Rows>, memory: DeviceMemory, bytes: Range<u64>) {
    let (mut first, mut left) = (bytes.start, bytes.end - bytes.start);
    if left > COPY_ROW_BYTES {
        let (len, count) = (COPY_ROW_BYTES, left / COPY_ROW_BYTES);
        rows.push(Rows { memory, first, len, step: len, count });
        (first, left) = (first + len * count, left % COPY_ROW_BYTES);
    }
    if left == 0 {
        return;
    }
    let fits = |last: &&mut Rows| {
        last.memory.address() == memory.address() && last.len == left && last.first <= first
    };
    if let Some(last) = rows.last_mut().filter(fits) {
        if last.count == 1 {
            (last.step, last.count) = (first - last.first, 2);
            return;
        }
        if first == last.first + last.step * last.count {
            last.count += 1;
            return;
        }
    }
    rows.push(Rows { memory, first, len: left, step: left, count: 1 });
}

/// Items of one batch: index, offset and length of each.
#[derive(Default)]
struct Batch {
    items: Vec<(usize, usize, usize)>,
    /// Descriptors for each session; `to` counts from the start of the slot's frames.
    rows: Vec<Vec<CopyRows>>,
    bytes: u64,
    /// The slot that it is copied to.
    slot: usize,
}

/// The most bytes and descriptors of an item.
pub(super) fn room(session: &Session<'_>) -> (u64, u64) {
    (session.sizes.frames, session.sizes.meta / DESCRIPTOR as u64)
}

/// Fetches the rows of each item, one item after the other.
pub(super) fn run<E: From<CudaError>>(
    sessions: &[Session<'_>],
    items: &[Vec<Rows>],
    mut sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
) -> Result<(), E> {
    // The smallest slot counts: an item has the same place in the slots of all devices.
    let sizes = sessions.iter().map(|s| s.sizes);
    let Some(sizes) = sizes.min_by_key(|s| s.frames) else {
        return items.iter().enumerate().try_for_each(|(i, _)| sink(&[(i, &[])]));
    };
    let mut batch = Batch::default();
    let mut before = None;
    let mut most = sizes.frames / FIRST;
    for (number, rows) in items.iter().enumerate() {
        let bytes: u64 = rows.iter().map(Rows::bytes).sum();
        let more = rows.iter().map(Rows::descriptors).sum::<u64>();
        let room = |batch: &Batch, most: u64| {
            let rows = batch.rows.iter().map(Vec::len).max().unwrap_or(0) as u64;
            batch.bytes + bytes <= most && (rows + more) * DESCRIPTOR as u64 <= sizes.meta
        };
        if !room(&batch, most) && !batch.items.is_empty() {
            let next = Batch { slot: (batch.slot + 1) % PLAN_SLOTS, ..Batch::default() };
            let full = std::mem::replace(&mut batch, next);
            start(sessions, &full)?;
            hand_on(sessions, before.replace(full), &mut sink)?;
            most = sizes.frames;
        }
        if !room(&batch, sizes.frames) {
            let (what, budget) = ("an item to fetch", sizes.frames);
            return Err(CudaError::from(GpuError::Budget { what, needed: bytes, budget }).into());
        }
        add(&mut batch, sessions, number, rows);
    }
    start(sessions, &batch)?;
    hand_on(sessions, before, &mut sink)?;
    hand_on(sessions, Some(batch), &mut sink)
}

fn add(batch: &mut Batch, sessions: &[Session<'_>], number: usize, rows: &[Rows]) {
    batch.rows.resize_with(sessions.len(), Vec::new);
    let start = batch.bytes;
    for all in rows {
        let own = sessions.iter().position(|s| s.worker.device.ordinal() == all.ordinal());
        let mut left = Some(*all);
        while let (Some(own), Some(rows)) = (own, left) {
            let (now, later) = rows.split(rows.at_once() * rows.len);
            let Rows { memory, first, len, step, count } = now;
            let from = memory.address() + first;
            batch.rows[own].push(CopyRows { from, to: batch.bytes, len, step, count });
            batch.bytes += now.bytes();
            left = later;
        }
    }
    batch.items.push((number, start as usize, (batch.bytes - start) as usize));
    // The next item starts where copies are fast.
    batch.bytes = batch.bytes.next_multiple_of(16);
}

/// Hands a batch on once it has arrived. Parts of an item may lie on several devices.
fn hand_on<E: From<CudaError>>(
    sessions: &[Session<'_>],
    batch: Option<Batch>,
    sink: &mut impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
) -> Result<(), E> {
    let Some(batch) = batch.filter(|batch| !batch.items.is_empty()) else { return Ok(()) };
    for session in sessions {
        session.worker.slots[batch.slot].copied.synchronize().map_err(CudaError::from)?;
    }
    let joined;
    let bytes = match sessions {
        // SAFETY: the copies into the slot are done.
        [session] => unsafe {
            session.worker.slots[batch.slot].pinned.slice(0, batch.bytes as usize)
        },
        _ => {
            joined = join(sessions, &batch);
            &joined
        }
    };
    let items = batch.items.iter().map(|&(n, at, len)| (n, &bytes[at..at + len]));
    sink(&items.collect::<Vec<_>>())
}

/// Joins the bytes of a batch from the slots of several devices.
fn join(sessions: &[Session<'_>], batch: &Batch) -> Vec<u8> {
    let mut bytes = vec![0u8; batch.bytes as usize];
    for (session, rows) in sessions.iter().zip(&batch.rows) {
        for row in rows {
            let (at, len) = (row.to as usize, (row.len * row.count) as usize);
            // SAFETY: the copies into the slots are done.
            let from = unsafe { session.worker.slots[batch.slot].pinned.slice(at, len) };
            bytes[at..at + len].copy_from_slice(from);
        }
    }
    bytes
}

/// Queues the copies of a batch.
fn start(sessions: &[Session<'_>], batch: &Batch) -> Result<()> {
    for (session, rows) in sessions.iter().zip(&batch.rows) {
        if !rows.is_empty() {
            start_on(session, batch.slot, rows)?;
        }
    }
    Ok(())
}

fn start_on(session: &Session<'_>, slot: usize, rows: &[CopyRows]) -> Result<()> {
    let Worker { compute, slots, .. } = &*session.worker;
    let compute: &Stream = compute;
    let (frames, meta) = (session.frames(slot), session.meta(slot));
    let (pinned, at) = (&slots[slot].pinned, session.pinned_meta());
    // SAFETY: the slot's previous batch was handed on.
    let to = unsafe { pinned.slice_mut(at, rows.len() * DESCRIPTOR) };
    for (to, row) in to.chunks_exact_mut(DESCRIPTOR).zip(rows) {
        let row = CopyRows { to: frames + row.to, ..*row };
        to.copy_from_slice(bytemuck::bytes_of(&row));
    }
    // At most what fits the slot's memory for descriptors.
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    let end = rows.last().map_or(0, |last| (last.to + last.len * last.count) as usize);
    // SAFETY: the rows are parts of the caller's memory and of the slot's frames, side by side.
    unsafe {
        compute.copy_to_device(pinned, at, rows.len() * DESCRIPTOR, meta)?;
        // Gaps between items are copied to the host, too.
        compute.fill(frames, 0, end as u64)?;
        compute.copy_rows(meta, count)?;
        compute.copy_to_host(frames, pinned, 0, end)?;
    }
    Ok(slots[slot].copied.record(compute)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges that rows are made of, in values of 4 bytes.
    fn ranges(rows: &[Rows]) -> Vec<Range<u64>> {
        let row = |r: &Rows| {
            let r = *r;
            (0..r.count).map(move |i| r.first + i * r.step).map(move |at| at / 4..(at + r.len) / 4)
        };
        rows.iter().flat_map(row).collect()
    }

    #[test]
    fn runs_that_are_evenly_spaced_are_one_descriptor() {
        // SAFETY: nobody uses it.
        let memory = unsafe { DeviceMemory::new(0, 1 << 40, 4 << 20, 0) };
        let diagonal = (0..512u64).map(|row| {
            let first = row * 1000 + 64 * (row % 15);
            first..first + 64
        });
        for (wanted, most) in [
            (diagonal.clone().collect::<Vec<_>>(), 512 / 15 + 1),
            (diagonal.chain([0..1000, 8000..9000]).collect(), 512 / 15 + 2),
            (vec![0..1 << 19, 1 << 19..1 << 20], 2),
            (vec![5..5, 7..8, 3..4], 2),
            (vec![100..3000, 5000..5001], 3),
            (vec![], 0),
        ] {
            let rows = Rows::of(memory, 4, wanted.iter().cloned()).unwrap();
            assert!(rows.len() <= most, "{} of {}: {rows:?}", rows.len(), wanted.len());
            assert!(ranges(&rows).into_iter().flatten().eq(wanted.into_iter().flatten()));
            for r in &rows {
                let (mut left, mut parts) = (Some(*r), vec![]);
                while let Some(rows) = left {
                    let (now, later) = rows.split(300);
                    assert!(now.bytes() <= 300 || now.count == 1);
                    parts.push(now);
                    left = later;
                }
                assert_eq!(ranges(&parts), ranges(&[*r]));
            }
        }
        assert!(Rows::of(memory, 4, std::iter::once(0..(1 << 20) + 1)).is_err());
    }
}
