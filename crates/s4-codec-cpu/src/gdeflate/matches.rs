//! Matches within a page, found greedily.

/// A literal or a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Item(u32);

/// Shortest match that is looked for: shorter ones rarely pay for their offset.
const MIN: usize = 4;
/// Longest match: the longest that one symbol and 5 bits can express.
const MAX: usize = 258;
/// Bits of the table's index.
const HASH_BITS: u32 = 13;

impl Item {
    /// A literal.
    pub(super) fn literal(byte: u8) -> Self {
        Self(u32::from(byte))
    }

    fn copy(len: usize, offset: usize) -> Self {
        Self((len as u32) << 16 | (offset - 1) as u32)
    }

    /// The literal, or length and offset.
    pub(super) fn parts(self) -> Result<u8, (usize, usize)> {
        match self.0 >> 16 {
            0 => Ok(self.0 as u8),
            len => Err((len as usize, (self.0 & 0xffff) as usize + 1)),
        }
    }
}

/// Spells `page`, at most 64 KiB, with the most recent match for each four bytes. Returns an empty
/// list if there are no matches.
pub(super) fn find(page: &[u8]) -> Vec<Item> {
    let mut items = Vec::with_capacity(page.len());
    // For each hash, the position where it was last seen, plus 1.
    let mut seen = vec![0u32; 1 << HASH_BITS];
    let mut at = 0;
    let mut any = false;
    while at < page.len() {
        let here = &page[at..];
        let Some(key) = here.first_chunk::<MIN>() else {
            items.extend(here.iter().map(|b| Item::literal(*b)));
            break;
        };
        let hash = u32::from_le_bytes(*key).wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS);
        let before = std::mem::replace(&mut seen[hash as usize], at as u32 + 1);
        let len = match before.checked_sub(1) {
            Some(from) => common(&page[from as usize..], here),
            None => 0,
        };
        if len < MIN {
            items.push(Item::literal(here[0]));
            at += 1;
        } else {
            items.push(Item::copy(len, at + 1 - before as usize));
            at += len;
            any = true;
        }
    }
    if !any {
        items.clear();
    }
    items
}

/// The length of the common prefix, at most [`MAX`].
fn common(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take(MAX).take_while(|(a, b)| a == b).count()
}
