//! The writer of a page: it deals bits to 32 lanes, and puts words in the order in which a
//! decoder takes them.

/// Lanes of a page.
pub(super) const LANES: usize = 32;

/// Takes bits for each lane and lays out words.
pub(super) struct LaneWriter<'a> {
    dst: &'a mut [u8],
    /// Position of the next word that a decoder takes.
    next: usize,
    lane: usize,
    lanes: [Lane; LANES],
}

#[derive(Clone, Copy, Default)]
struct Lane {
    bits: u64,
    /// Bits in `bits`: fewer than 32 between calls.
    filled: u32,
    /// Position of the word that is being filled.
    word: usize,
    /// Position of the word after it, if the decoder takes it before this one is full.
    ahead: Option<usize>,
}

impl<'a> LaneWriter<'a> {
    /// Every lane starts with a word. `dst` must have 256 bytes more than the bits that will be put.
    pub(super) fn new(dst: &'a mut [u8]) -> Self {
        let lanes = std::array::from_fn(|lane| Lane { word: 4 * lane, ..Lane::default() });
        Self { dst, next: 4 * LANES, lane: 0, lanes }
    }

    /// Starts again with the first lane.
    pub(super) fn first_lane(&mut self) {
        self.lane = 0;
    }

    /// The lane that is being written.
    pub(super) fn lane(&self) -> usize {
        self.lane
    }

    /// Appends the low `count` bits of `bits` to the lane; the other bits must be 0. At most 32
    /// bits may be put between two calls of [`Self::advance`].
    pub(super) fn put(&mut self, bits: u32, count: u32) {
        if count == 0 {
            return;
        }
        // As soon as a decoder takes bits from a word, it fetches the next word of the lane.
        let lane = &mut self.lanes[self.lane];
        let ahead = *lane.ahead.get_or_insert_with(|| {
            self.next += 4;
            self.next - 4
        });
        lane.bits |= u64::from(bits) << lane.filled;
        lane.filled += count;
        if lane.filled >= 32 {
            self.dst[lane.word..][..4].copy_from_slice(&(lane.bits as u32).to_le_bytes());
            lane.bits >>= 32;
            lane.filled -= 32;
            lane.word = ahead;
            lane.ahead = None;
            if lane.filled > 0 {
                lane.ahead = Some(self.next);
                self.next += 4;
            }
        }
    }

    /// Moves on to the next lane.
    pub(super) fn advance(&mut self) {
        self.lane = (self.lane + 1) % LANES;
    }

    /// Writes what is left; returns the size of the page.
    pub(super) fn finish(self) -> usize {
        for lane in self.lanes {
            self.dst[lane.word..][..4].copy_from_slice(&(lane.bits as u32).to_le_bytes());
            if let Some(ahead) = lane.ahead {
                self.dst[ahead..][..4].fill(0);
            }
        }
        self.next
    }
}
