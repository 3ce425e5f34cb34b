//! A file whose end is kept in memory.

use std::ops::Range;

use bytes::Bytes;

use super::ReadAt;
use crate::error::Result;

/// Number of a file's last bytes that are read first: footer, manifest and index of most files, and
/// all of a small one.
const TAIL: u64 = 64 << 10;

/// A file whose end is read once, before anything else is.
pub(crate) struct TailSource {
    source: Box<dyn ReadAt>,
    tail: Bytes,
    /// The offset of the tail in the file.
    from: u64,
}

impl TailSource {
    pub(crate) fn new(source: Box<dyn ReadAt>) -> Result<Self> {
        let len = source.len();
        let from = len - len.min(TAIL);
        let tail = match source.in_memory(from..len) {
            Some(bytes) => bytes,
            None => {
                let mut bytes = vec![0; usize::try_from(len - from).unwrap_or(0)];
                source.read_at(from, &mut bytes)?;
                bytes.into()
            }
        };
        Ok(Self { source, tail, from })
    }

    /// The last bytes.
    pub(crate) fn tail(&self) -> &[u8] {
        &self.tail
    }
}

impl ReadAt for TailSource {
    fn len(&self) -> u64 {
        self.source.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match self.in_memory(offset..offset.saturating_add(buf.len() as u64)) {
            Some(bytes) => buf.copy_from_slice(&bytes),
            None => self.source.read_at(offset, buf)?,
        }
        Ok(())
    }

    fn in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        let within = |at: u64| usize::try_from(at.checked_sub(self.from)?).ok();
        match (within(range.start), within(range.end)) {
            (Some(start), Some(end)) if start <= end && end <= self.tail.len() => {
                Some(self.tail.slice(start..end))
            }
            _ => self.source.in_memory(range),
        }
    }

    fn request_size(&self) -> usize {
        self.source.request_size()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Counts the bytes that are read.
    struct Counted(Vec<u8>, Arc<AtomicU64>);

    impl ReadAt for Counted {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            self.1.fetch_add(buf.len() as u64, Ordering::Relaxed);
            buf.copy_from_slice(&self.0[offset as usize..][..buf.len()]);
            Ok(())
        }
    }

    #[test]
    fn the_end_is_read_once() {
        for len in [0, 5, TAIL, TAIL + 1, 3 * TAIL] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let read = Arc::<AtomicU64>::default();
            let source = Counted(bytes.clone(), Arc::clone(&read));
            let source = TailSource::new(Box::new(source)).unwrap();
            let from = len - len.min(TAIL);
            assert_eq!(read.swap(0, Ordering::Relaxed), len - from);
            for (start, end) in [(from, len), (len, len), (from + (len - from) / 2, len), (0, len)]
            {
                let mut part = vec![0; (end - start) as usize];
                source.read_at(start, &mut part).unwrap();
                assert!(part == bytes[start as usize..end as usize]);
                let again = read.swap(0, Ordering::Relaxed);
                assert_eq!(again, if start < from { end - start } else { 0 });
            }
            assert!(source.in_memory(len..len + 1).is_none());
        }
    }
}
