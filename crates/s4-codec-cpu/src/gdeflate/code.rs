//! Prefix codes: the meanings of the symbols, and tables that decode them.

use s4_format::{Error, Result};

/// Longest codeword of literals, lengths and offsets, in bits.
pub(super) const MAX_BITS: usize = 15;
/// Longest codeword of the code length code, which codes the codeword lengths of the others.
pub(super) const MAX_PRE_BITS: usize = 7;
/// Symbols of literals and lengths.
pub(super) const LITLEN: usize = 288;
/// Symbols of offsets.
pub(super) const OFFSETS: usize = 32;
/// The symbol that ends a block.
pub(super) const END: usize = 256;
/// The order in which the codeword lengths of the code length code are written.
pub(super) const PRE_ORDER: [u8; 19] =
    [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// First value and number of extra bits of the length symbols, from 257 on.
pub(super) const LENGTHS: [(u16, u8); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (3, 16),
]; // rustfmt would give each a line

/// First value and number of extra bits of an offset symbol.
pub(super) fn offset_base(symbol: usize) -> (u16, u8) {
    match symbol {
        0..4 => (1 + symbol as u16, 0),
        _ => {
            let extra = symbol / 2 - 1;
            (1 + ((2 + symbol as u16 % 2) << extra), extra as u8)
        }
    }
}

/// The codeword lengths of the fixed codes.
pub(super) fn fixed() -> ([u8; LITLEN], [u8; OFFSETS]) {
    let mut litlen = [8; LITLEN];
    litlen[144..256].fill(9);
    litlen[256..280].fill(7);
    (litlen, [5; OFFSETS])
}

/// The first codeword of each length, most significant bit first, given the number of codewords of
/// each length.
pub(super) fn first_codes(counts: &[u16; MAX_BITS + 1]) -> [u16; MAX_BITS + 1] {
    let mut first = [0u16; MAX_BITS + 1];
    for bits in 1..=MAX_BITS {
        let before = if bits == 1 { 0 } else { counts[bits - 1] };
        first[bits] = (first[bits - 1] + before) << 1;
    }
    first
}

/// The number of codewords of each length. Index 0 counts the symbols without one.
pub(super) fn count_lengths(lengths: &[u8]) -> [u16; MAX_BITS + 1] {
    let mut counts = [0u16; MAX_BITS + 1];
    for &bits in lengths {
        counts[usize::from(bits)] += 1;
    }
    counts
}

/// A decoded symbol with its meaning, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodeEntry(u32);

impl CodeEntry {
    /// A codeword that is longer than the table's index, or no codeword.
    const LONG: Self = Self(0);
    const LITERAL: u32 = 1 << 9;
    const ENDS: u32 = 1 << 10;
    const INVALID: u32 = 1 << 11;

    fn new(value: u16, extra: u8, flags: u32) -> Self {
        Self(u32::from(value) << 16 | flags | u32::from(extra) << 4)
    }
    /// A symbol of the code length code.
    pub(super) fn plain(symbol: usize) -> Self {
        Self::new(symbol as u16, 0, 0)
    }
    /// A symbol of literals and lengths.
    pub(super) fn litlen(symbol: usize) -> Self {
        match symbol.checked_sub(END) {
            None => Self::new(symbol as u16, 0, Self::LITERAL),
            Some(0) => Self::new(0, 0, Self::ENDS),
            Some(n) => match LENGTHS.get(n - 1) {
                Some(&(base, extra)) => Self::new(base, extra, 0),
                None => Self::new(0, 0, Self::INVALID),
            },
        }
    }
    /// A symbol of offsets.
    pub(super) fn offset(symbol: usize) -> Self {
        let (base, extra) = offset_base(symbol);
        Self::new(base, extra, 0)
    }
    fn with_bits(self, bits: usize) -> Self {
        Self(self.0 | bits as u32)
    }
    /// Bits of the codeword.
    pub(super) fn bits(self) -> u32 {
        self.0 & 15
    }
    /// Bits that follow the codeword and are added to the value.
    pub(super) fn extra(self) -> u32 {
        self.0 >> 4 & 31
    }
    /// The literal, or the first value.
    pub(super) fn value(self) -> u32 {
        self.0 >> 16
    }
    /// Whether it is a literal.
    pub(super) fn is_literal(self) -> bool {
        self.0 & Self::LITERAL != 0
    }
    /// Whether it ends the block.
    pub(super) fn ends(self) -> bool {
        self.0 & Self::ENDS != 0
    }
    fn is_invalid(self) -> bool {
        self.0 & Self::INVALID != 0
    }
}

/// A code in the form for decoding: a table indexed by the next `INDEX` = log2(`SIZE`) bits, and
/// for longer codewords the symbols in the order of their codewords.
#[derive(Debug)]
pub(super) struct Decoder<const SIZE: usize> {
    table: [CodeEntry; SIZE],
    counts: [u16; MAX_BITS + 1],
    sorted: [u16; LITLEN],
    meaning: fn(usize) -> CodeEntry,
}

impl<const SIZE: usize> Decoder<SIZE> {
    const INDEX: usize = SIZE.trailing_zeros() as usize;

    /// The code whose symbols have codewords of these lengths (0 = none).
    ///
    /// # Errors
    /// `Corrupt` unless the code is complete, empty, or a single codeword of one bit.
    pub(super) fn new(lengths: &[u8], meaning: fn(usize) -> CodeEntry) -> Result<Self> {
        let mut counts = count_lengths(lengths);
        counts[0] = 0;
        let used: u32 = (1..=MAX_BITS).map(|b| u32::from(counts[b]) << (MAX_BITS - b)).sum();
        let single = used == 1 << (MAX_BITS - 1) && counts[1] == 1;
        if used != 1 << MAX_BITS && used != 0 && !single {
            return Err(Error::corrupt("code is neither complete nor a single codeword"));
        }
        let mut code =
            Self { table: [CodeEntry::LONG; SIZE], counts, sorted: [0; LITLEN], meaning };
        let mut next = first_codes(&counts);
        let mut place = [0u16; MAX_BITS + 2];
        for bits in 1..=MAX_BITS {
            place[bits + 1] = place[bits] + counts[bits];
        }
        for (symbol, &bits) in lengths.iter().enumerate().filter(|(_, bits)| **bits > 0) {
            let bits = usize::from(bits);
            code.sorted[usize::from(place[bits])] = symbol as u16;
            place[bits] += 1;
            let word = usize::from(next[bits].reverse_bits()) >> (16 - bits);
            next[bits] += 1;
            if bits <= Self::INDEX {
                let entry = meaning(symbol).with_bits(bits);
                code.table[word..].iter_mut().step_by(1 << bits).for_each(|e| *e = entry);
            }
        }
        Ok(code)
    }

    /// The table's entry for the codeword at the low end of `bits`. A literal can be used directly;
    /// anything else must go through [`Self::find`].
    #[inline(always)]
    pub(super) fn peek(&self, bits: u64) -> CodeEntry {
        self.table[bits as usize % SIZE]
    }

    /// The symbol whose codeword is at the low end of `bits`.
    ///
    /// # Errors
    /// `Corrupt` if there is none, or it has no meaning.
    #[inline]
    pub(super) fn find(&self, bits: u64) -> Result<CodeEntry> {
        let entry = match self.peek(bits) {
            CodeEntry::LONG => self.find_long(bits)?,
            entry => entry,
        };
        if entry.is_invalid() {
            return Err(Error::corrupt("invalid symbol"));
        }
        Ok(entry)
    }

    #[cold]
    fn find_long(&self, bits: u64) -> Result<CodeEntry> {
        let first = first_codes(&self.counts);
        let (mut code, mut place) = (0u16, 0u16);
        for (len, (first, &count)) in first.iter().zip(&self.counts).enumerate().skip(1) {
            code = code << 1 | (bits >> (len - 1) & 1) as u16;
            if let Some(nth) = code.checked_sub(*first).filter(|nth| *nth < count) {
                let symbol = usize::from(self.sorted[usize::from(place + nth)]);
                return Ok((self.meaning)(symbol).with_bits(len));
            }
            place += count;
        }
        Err(Error::corrupt("bits match no codeword"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_lengths_follow_each_other() {
        let mut next = 1;
        for symbol in 0..OFFSETS {
            let (base, extra) = offset_base(symbol);
            assert_eq!(u32::from(base), next, "offset symbol {symbol}");
            next += 1 << extra;
        }
        assert_eq!(next, 65_537);
        let mut next = 3;
        for &(base, extra) in &LENGTHS[..28] {
            assert_eq!(base, next);
            next += 1 << extra;
        }
        assert_eq!(next, 259);
    }

    #[test]
    fn long_codewords_are_found() {
        // Lengths 1, 2, 3, ... 14, 15, 15: codewords 0, 10, 110, ...
        let lengths: Vec<u8> = (1..=15).chain([15]).collect();
        let code = Decoder::<256>::new(&lengths, CodeEntry::plain).unwrap();
        for symbol in 0..16 {
            let bits = (1u64 << symbol) - 1;
            let bits = if symbol == 15 { bits } else { bits | 0xffff << (symbol + 1) };
            let found = code.find(bits).unwrap();
            assert_eq!(found.value(), symbol as u32);
            assert_eq!(found.bits(), (symbol as u32 + 1).min(15));
        }
    }

    #[test]
    fn codes_that_are_not_complete_are_refused() {
        let make = |lengths: &[u8]| Decoder::<256>::new(lengths, CodeEntry::plain);
        assert!(make(&[1, 1, 1]).is_err());
        assert!(make(&[1, 2]).is_err());
        assert!(make(&[2]).is_err());
        let single = make(&[0, 1]).unwrap();
        assert_eq!(single.find(0).unwrap().value(), 1);
        assert!(single.find(1).is_err());
        assert!(make(&[0, 0]).unwrap().find(0).is_err());
    }
}
