//! The encoder of a page: one block, written in the cheapest way.

use super::code::{
    END, LENGTHS, LITLEN, MAX_BITS, MAX_PRE_BITS, OFFSETS, PRE_ORDER, fixed, offset_base,
};
use super::huffman::{codewords, lengths};
use super::lanes::LANES;
use super::lanes::LaneWriter;
use super::matches::Item;

/// Most bytes in one stored block.
const MAX_STORED: usize = 0xffff;

/// Encodes one page into `dst`, which has at least `Gdeflate::block_bound` bytes; `items`, if there
/// are any, spell `src` with matches. Returns its size.
pub(super) fn page(src: &[u8], items: &[Item], dst: &mut [u8]) -> usize {
    let mut writer = LaneWriter::new(dst);
    let literals = || src.iter().map(|b| Item::literal(*b));
    let plain = Plan::best(literals());
    let matched = (!items.is_empty()).then(|| Plan::best(items.iter().copied()));
    let matched = matched.filter(|m| m.bits < plain.bits);
    let stored_bits = 8 * src.len() as u64 + 19 * src.len().div_ceil(MAX_STORED) as u64;
    match matched {
        Some(plan) if plan.bits < stored_bits => plan.write(&mut writer, items.iter().copied()),
        None if plain.bits < stored_bits => plain.write(&mut writer, literals()),
        _ => stored(&mut writer, src),
    }
    writer.finish()
}

/// Writes bytes as they are.
fn stored(writer: &mut LaneWriter<'_>, src: &[u8]) {
    let blocks = src.len().div_ceil(MAX_STORED);
    for (number, part) in src.chunks(MAX_STORED).enumerate() {
        writer.first_lane();
        writer.put(u32::from(number + 1 == blocks), 3);
        writer.put(part.len() as u32, 16);
        for &byte in part {
            writer.put(u32::from(byte), 8);
            writer.advance();
        }
    }
}

/// For the length of a match: its symbol in the code of literals and lengths, the extra bits, and
/// their count.
fn length_symbol(len: usize) -> (usize, u32, u32) {
    // The last entry is the general one of 16 bits, which the matches here never need.
    let at = LENGTHS[..28].partition_point(|(base, _)| usize::from(*base) <= len) - 1;
    let (base, extra) = LENGTHS[at];
    (257 + at, (len - usize::from(base)) as u32, u32::from(extra))
}

/// For an offset: its symbol, the extra bits, and their count.
fn offset_symbol(offset: usize) -> (usize, u32, u32) {
    let symbol = match offset {
        0..5 => offset.saturating_sub(1),
        _ => {
            let log = (offset - 1).ilog2() as usize;
            2 * log + ((offset - 1) >> (log - 1) & 1)
        }
    };
    let (base, extra) = offset_base(symbol);
    (symbol, (offset - usize::from(base)) as u32, u32::from(extra))
}

/// Both codes of a block, how they are written, and the size of the block.
struct Plan {
    litlen: [u8; LITLEN],
    offsets: [u8; OFFSETS],
    header: Option<Header>,
    bits: u64,
}

impl Plan {
    /// The cheaper of the codes made for the items and the fixed codes.
    fn best(items: impl Iterator<Item = Item>) -> Self {
        let (mut litlen_counts, mut offset_counts) = ([0u32; LITLEN], [0u32; OFFSETS]);
        let mut extra_bits = 0;
        for item in items {
            match item.parts() {
                Ok(byte) => litlen_counts[usize::from(byte)] += 1,
                Err((len, offset)) => {
                    let (symbol, _, extra) = length_symbol(len);
                    litlen_counts[symbol] += 1;
                    extra_bits += u64::from(extra);
                    let (symbol, _, extra) = offset_symbol(offset);
                    offset_counts[symbol] += 1;
                    extra_bits += u64::from(extra);
                }
            }
        }
        litlen_counts[END] = 1;
        let cost = |counts: &[u32], lengths: &[u8]| -> u64 {
            counts.iter().zip(lengths).map(|(c, b)| u64::from(*c) * u64::from(*b)).sum()
        };
        let whole = |litlen: &[u8], offsets: &[u8]| {
            3 + extra_bits + cost(&litlen_counts, litlen) + cost(&offset_counts, offsets)
        };
        let (litlen, offsets) = fixed();
        let bits = whole(&litlen, &offsets);
        let plain = Self { litlen, offsets, header: None, bits };

        let (mut litlen, mut offsets) = ([0; LITLEN], [0; OFFSETS]);
        lengths(&litlen_counts, &mut litlen, MAX_BITS);
        lengths(&offset_counts, &mut offsets, MAX_BITS);
        let header = Header::new(&litlen, &offsets);
        let bits = whole(&litlen, &offsets) + header.bits();
        if bits < plain.bits { Self { litlen, offsets, header: Some(header), bits } } else { plain }
    }

    fn write(&self, writer: &mut LaneWriter<'_>, items: impl Iterator<Item = Item>) {
        let kind = if self.header.is_some() { 2 } else { 1 };
        writer.put(1 | kind << 1, 3);
        if let Some(header) = &self.header {
            header.write(writer);
        }
        let (mut litlen, mut offsets) = ([0; LITLEN], [0; OFFSETS]);
        codewords(&self.litlen, &mut litlen);
        codewords(&self.offsets, &mut offsets);
        let word = |symbol: usize| (u32::from(litlen[symbol]), u32::from(self.litlen[symbol]));
        // The offset that each lane owes: bits and their count.
        let mut owed = [(0, 0); LANES];
        writer.first_lane();
        for item in items {
            settle(writer, &mut owed);
            match item.parts() {
                Ok(byte) => {
                    let (bits, count) = word(usize::from(byte));
                    writer.put(bits, count);
                }
                Err((len, offset)) => {
                    let (symbol, rest, extra) = length_symbol(len);
                    let (bits, count) = word(symbol);
                    writer.put(bits | rest << count, count + extra);
                    let (symbol, rest, extra) = offset_symbol(offset);
                    let count = u32::from(self.offsets[symbol]);
                    let bits = u32::from(offsets[symbol]) | rest << count;
                    owed[writer.lane()] = (bits, count + extra);
                }
            }
            writer.advance();
        }
        settle(writer, &mut owed);
        let (bits, count) = word(END);
        writer.put(bits, count);
        for _ in 0..LANES {
            let (bits, count) = owed[writer.lane()];
            writer.put(bits, count);
            writer.advance();
        }
    }
}

/// Writes the offsets that lanes owe, from the current lane up to one that owes nothing.
fn settle(writer: &mut LaneWriter<'_>, owed: &mut [(u32, u32); LANES]) {
    loop {
        let (bits, count) = std::mem::take(&mut owed[writer.lane()]);
        if count == 0 {
            return;
        }
        writer.put(bits, count);
        writer.advance();
    }
}

/// The codeword lengths of both codes as they are written: run lengths in a code of their own.
struct Header {
    litlen: usize,
    offsets: usize,
    /// Symbol of the code length code, extra bits, and their count.
    runs: Vec<(u8, u8, u8)>,
    lengths: [u8; 19],
    explicit: usize,
}

impl Header {
    fn new(litlen: &[u8; LITLEN], offsets: &[u8; OFFSETS]) -> Self {
        let used = |lengths: &[u8], least: usize| {
            lengths.iter().rposition(|b| *b > 0).map_or(least, |last| (last + 1).max(least))
        };
        let (litlen_used, offsets_used) = (used(litlen, 257), used(offsets, 1));
        let all = [&litlen[..litlen_used], &offsets[..offsets_used]].concat();
        let runs = runs(&all);
        let mut counts = [0; 19];
        for (symbol, ..) in &runs {
            counts[usize::from(*symbol)] += 1;
        }
        let mut pre = [0; 19];
        lengths(&counts, &mut pre, MAX_PRE_BITS);
        let last = PRE_ORDER.iter().rposition(|symbol| pre[usize::from(*symbol)] > 0);
        let explicit = last.map_or(4, |last| (last + 1).max(4));
        Self { litlen: litlen_used, offsets: offsets_used, runs, lengths: pre, explicit }
    }

    fn bits(&self) -> u64 {
        let run = |(symbol, _, extra): &(u8, u8, u8)| {
            u64::from(self.lengths[usize::from(*symbol)]) + u64::from(*extra)
        };
        14 + 3 * self.explicit as u64 + self.runs.iter().map(run).sum::<u64>()
    }

    fn write(&self, writer: &mut LaneWriter<'_>) {
        writer.put((self.litlen - 257) as u32, 5);
        writer.put((self.offsets - 1) as u32, 5);
        writer.put((self.explicit - 4) as u32, 4);
        for &symbol in &PRE_ORDER[..self.explicit] {
            writer.put(u32::from(self.lengths[usize::from(symbol)]), 3);
            writer.advance();
        }
        writer.first_lane();
        let mut words = [0; 19];
        codewords(&self.lengths, &mut words);
        for &(symbol, rest, extra) in &self.runs {
            let count = u32::from(self.lengths[usize::from(symbol)]);
            let bits = u32::from(words[usize::from(symbol)]) | u32::from(rest) << count;
            writer.put(bits, count + u32::from(extra));
            writer.advance();
        }
    }
}

/// Runs of equal lengths: the length itself, 16 (the one before, 3 to 6 times), 17 and 18 (zeros, 3
/// to 10 and 11 to 138 times).
fn runs(lengths: &[u8]) -> Vec<(u8, u8, u8)> {
    let mut out = Vec::with_capacity(lengths.len());
    for run in lengths.chunk_by(|a, b| a == b) {
        let mut left = run.len();
        if run[0] != 0 {
            out.push((run[0], 0, 0));
            left -= 1;
        }
        while left > 0 {
            let (item, taken) = match (run[0], left) {
                (_, 1 | 2) => ((run[0], 0, 0), 1),
                (0, 3..11) => ((17, left as u8 - 3, 3), left),
                (0, _) => ((18, left.min(138) as u8 - 11, 7), left.min(138)),
                // Not 6 of 7 or 8: the rest would be too short for a run.
                (_, 7 | 8) => ((16, 1, 2), 4),
                _ => ((16, left.min(6) as u8 - 3, 2), left.min(6)),
            };
            out.push(item);
            left -= taken;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_give_their_values_back() {
        for len in 3..=258 {
            let (symbol, rest, extra) = length_symbol(len);
            assert_eq!(usize::from(LENGTHS[symbol - 257].0) + rest as usize, len);
            assert!(rest < 1 << extra || rest == 0);
        }
        for offset in 1..=65_536 {
            let (symbol, rest, extra) = offset_symbol(offset);
            assert!(symbol < OFFSETS && (rest < 1 << extra || rest == 0), "{offset}");
            assert_eq!(usize::from(offset_base(symbol).0) + rest as usize, offset);
        }
    }

    #[test]
    fn runs_spell_the_lengths() {
        for zeros in 0..300 {
            for same in 1..30 {
                let lengths: Vec<u8> =
                    [vec![0; zeros], vec![5; same], vec![0; same], vec![6]].concat();
                let mut spelled: Vec<u8> = Vec::new();
                for (symbol, rest, _) in runs(&lengths) {
                    let last = spelled.last().copied().unwrap_or(0);
                    let (value, times) = match symbol {
                        16 => (last, 3 + rest),
                        17 => (0, 3 + rest),
                        18 => (0, 11 + rest),
                        length => (length, 1),
                    };
                    spelled.extend(vec![value; usize::from(times)]);
                }
                assert_eq!(spelled, lengths);
            }
        }
    }
}
