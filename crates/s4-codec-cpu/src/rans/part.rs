//! One segment's worth of an encoder's work.

use super::stream::{LANES, STATES_LEN};

/// A segment to be encoded, and room for it.
pub(super) struct Part<'a> {
    pub(super) symbols: &'a [u8],
    /// The table of each symbol; empty if all use the first.
    pub(super) contexts: &'a [u8],
    /// The states to start with: 2^16 plus the word that each lane carries.
    pub(super) start: [u32; LANES],
    /// The destination of the final states.
    pub(super) states: &'a mut [u8; STATES_LEN],
    /// The destination of the words, which end at its end. As long as `stream::max_words_len` says.
    pub(super) words: &'a mut [u8],
    /// Bytes of words that were written.
    pub(super) len: usize,
}

#[cfg(target_arch = "x86_64")]
impl Part<'_> {
    /// The last block, padded, or `None` if the symbols fill it.
    pub(super) fn last_block(&self, padding: u8) -> Option<[u8; super::stream::BLOCK]> {
        use super::stream::{BLOCK, block_at};

        let start = self.symbols.len() / BLOCK * BLOCK;
        (start < self.symbols.len()).then(|| block_at(self.symbols, start, padding))
    }
}
