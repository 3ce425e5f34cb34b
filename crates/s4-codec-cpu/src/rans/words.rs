//! Reads the words of a segment in whole vectors, never outside the stream.

use s4_format::{Error, Result};

use super::stream::Segment;

/// Bytes of a [`Spare`].
const SPARE: usize = 1024;
/// The most bytes that [`Words::ensure`] can be asked for.
pub(super) const MAX_AHEAD: usize = SPARE / 2;

/// Room for the last words of a stream, followed by readable zeros.
#[repr(align(64))]
pub(super) struct Spare([u8; SPARE]);

impl Spare {
    pub(super) const NEW: Self = Self([0; SPARE]);
}

/// Position of a decoder in the words of a segment.
///
/// `next` and `limit` lie in one readable object, the stream or a [`Spare`], and so does `end` or
/// what follows it; `next <= end` after every successful [`Words::check`].
#[derive(Clone, Copy)]
pub(super) struct Words {
    /// The next word. A decoder advances it past the words that it took.
    pub(super) next: *const u8,
    /// The end of the segment's words.
    end: *const u8,
    /// The end of what may be read.
    limit: *const u8,
    spare: *mut Spare,
}

impl Words {
    /// The words of `segment`; `spare` takes over where the stream ends. Both outlive the result.
    pub(super) fn new(segment: &Segment<'_>, spare: &mut Spare) -> Self {
        let range = segment.tail.as_ptr_range();
        let end = segment.tail[..2 * segment.words].as_ptr_range().end;
        Self { next: range.start, end, limit: range.end, spare }
    }

    /// The same position with another spare, for reading the same words twice.
    pub(super) fn with_spare(self, spare: *mut Spare) -> Self {
        Self { spare, ..self }
    }

    /// Makes sure that the next `bytes` bytes may be read.
    ///
    /// # Safety
    /// - The segment and the spare given to [`Words::new`] are still valid, and no reference to the
    ///   spare is in use.
    /// - `next <= end`, as [`Words::check`] has found, and `bytes <= MAX_AHEAD`.
    #[inline]
    pub(super) unsafe fn ensure(&mut self, bytes: usize) {
        if (self.limit as usize) - (self.next as usize) < bytes {
            // SAFETY: as for this function.
            unsafe { self.move_to_spare() };
        }
    }

    /// Copies what is left of the segment to the spare, which is more than twice as long as that:
    /// [`Words::ensure`] has found that less than `MAX_AHEAD` bytes are readable.
    ///
    /// # Safety
    /// - As for [`Words::ensure`], and less than `MAX_AHEAD` bytes are left.
    #[cold]
    unsafe fn move_to_spare(&mut self) {
        let left = (self.end as usize) - (self.next as usize);
        debug_assert!(left < MAX_AHEAD);
        let mut copy = Spare::NEW;
        // SAFETY: `left` bytes from `next` on are the rest of the segment's words, in the stream or
        // already in the spare; fewer than MAX_AHEAD, so that they fit into `copy`. The spare is
        // valid, and there is no reference to it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.next, copy.0.as_mut_ptr(), left);
            *self.spare = copy;
            let start = self.spare.cast::<u8>().cast_const();
            *self = Self { next: start, end: start.add(left), limit: start.add(SPARE), ..*self };
        }
    }

    /// Checks that no more words were taken than there are.
    ///
    /// # Errors
    /// `Corrupt` if there were more.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        if self.next > self.end {
            return Err(Error::corrupt("rans segment has too few words"));
        }
        Ok(())
    }

    /// Lets `take` take words from those that are left of the segment.
    ///
    /// # Safety
    /// - The segment and the spare given to [`Words::new`] are still valid.
    /// - [`Words::check`] has succeeded.
    pub(super) unsafe fn as_slice<T>(
        &mut self,
        take: impl FnOnce(&mut &[[u8; 2]]) -> Result<T>,
    ) -> Result<T> {
        // SAFETY: the words from `next` to `end` lie in the stream or in the spare, which nothing
        // writes to in the meantime.
        let mut rest =
            unsafe { std::slice::from_raw_parts(self.next.cast::<[u8; 2]>(), self.left()) };
        let result = take(&mut rest);
        self.next = rest.as_ptr().cast();
        result
    }

    /// Number of words that were not taken.
    pub(super) fn left(&self) -> usize {
        ((self.end as usize) - (self.next as usize)) / 2
    }
}
