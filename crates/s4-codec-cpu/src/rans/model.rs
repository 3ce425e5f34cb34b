//! Turns counts of symbols into tables, and estimates the cost of coding with a table. Integers
//! only, so that every encoder writes the same tables.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

use super::table::{Precision, Table, TableEntry, encoded_len};

/// Streams up to this many symbols are counted as a whole.
const COUNT_ALL: usize = 8192;
/// Longer ones are sampled: [`SAMPLE`] symbols of every [`WINDOW`].
const WINDOW: usize = 512;
const SAMPLE: usize = 64;

/// The counts of each symbol in the counted part of some data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    of: [u64; 256],
    /// Whether the data holds only the counted symbols.
    complete: bool,
}

impl Default for Counts {
    fn default() -> Self {
        Self { of: [0; 256], complete: true }
    }
}

impl Counts {
    /// No symbols.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts of one stream, sampled if it is long.
    pub fn of_stream(symbols: &[u8]) -> Self {
        let mut counts = Self::new();
        counts.add_stream(symbols);
        counts
    }

    /// Counts of all symbols of a stream.
    pub fn of_all(symbols: &[u8]) -> Self {
        let mut parts = [[0u32; 256]; 8];
        count(symbols, &mut parts);
        let mut counts = Self::new();
        counts.add_parts(&parts);
        counts
    }

    /// Adds the counts of all symbols of some pieces of a stream.
    pub fn add_pieces<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) {
        let mut parts = [[0u32; 256]; 8];
        pieces.for_each(|piece| count(piece, &mut parts));
        self.add_parts(&parts);
    }

    /// Counts of all symbols of a stream for each context below `tables`. `contexts` is as long as `symbols` and
    /// below `tables`.
    pub fn of_all_in_contexts(symbols: &[u8], contexts: &[u8], tables: usize) -> Vec<Self> {
        Self::in_contexts(std::iter::once(0..symbols.len()), symbols, contexts, tables)
    }

    /// As [`Counts::of_all_in_contexts`], but sampled at the same positions as
    /// [`Counts::of_stream`].
    pub(crate) fn of_contexts(symbols: &[u8], contexts: &[u8], tables: usize) -> Vec<Self> {
        let mut counts = Self::in_contexts(sampled(symbols.len()), symbols, contexts, tables);
        let complete = symbols.len() <= COUNT_ALL;
        counts.iter_mut().for_each(|counts| counts.complete = complete);
        counts
    }

    fn in_contexts(
        ranges: impl Iterator<Item = Range<usize>>,
        symbols: &[u8],
        contexts: &[u8],
        tables: usize,
    ) -> Vec<Self> {
        // In two parts, so that the increments in a run of one symbol wait less for each other.
        let mut parts = vec![[[0u32; 256]; 2]; tables];
        for range in ranges {
            let pairs = symbols[range.clone()].iter().zip(&contexts[range]);
            for (i, (symbol, context)) in pairs.enumerate() {
                parts[usize::from(*context)][i % 2][usize::from(*symbol)] += 1;
            }
        }
        let counts = parts.iter().map(|[even, odd]| {
            let mut counts = Self::new();
            let sums = even.iter().zip(odd).map(|(a, b)| u64::from(*a) + u64::from(*b));
            counts.of.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum);
            counts
        });
        counts.collect()
    }

    /// Adds the counts of one stream, sampled if it is long.
    pub fn add_stream(&mut self, symbols: &[u8]) {
        self.complete &= symbols.len() <= COUNT_ALL;
        let mut parts = [[0u32; 256]; 8];
        for range in sampled(symbols.len()) {
            count(&symbols[range], &mut parts);
        }
        self.add_parts(&parts);
    }

    fn add_parts(&mut self, parts: &[[u32; 256]; 8]) {
        // Part by part, which takes vector instructions.
        let mut sums = [0u32; 256];
        for part in parts {
            sums.iter_mut().zip(part).for_each(|(sum, n)| *sum += n);
        }
        self.of.iter_mut().zip(sums).for_each(|(total, sum)| *total += u64::from(sum));
    }

    /// Marks the counts as those of a part of the data: a table made from them has an escape for
    /// symbols that were not counted.
    #[must_use]
    pub fn partial(mut self) -> Self {
        self.complete = false;
        self
    }

    /// If nothing was counted, makes these counts give a short table that can code any symbol.
    pub fn expect_any(&mut self) {
        if self.total() == 0 {
            self.add_symbol(0, 1);
            self.complete = false;
        }
    }

    /// Adds counts of other data.
    pub fn add(&mut self, other: &Self) {
        self.complete &= other.complete;
        self.of.iter_mut().zip(&other.of).for_each(|(a, b)| *a += b);
    }

    /// Adds `n` occurrences of a symbol.
    pub fn add_symbol(&mut self, symbol: u8, n: u64) {
        self.of[usize::from(symbol)] += n;
    }

    /// The count of a symbol.
    pub fn get(&self, symbol: u8) -> u64 {
        self.of[usize::from(symbol)]
    }

    /// Number of symbols counted.
    pub fn total(&self) -> u64 {
        self.of.iter().sum()
    }

    /// The table that codes data with these counts well ("Choice" and "Frequencies" of
    /// docs/codecs/rans.md).
    pub fn table(&self, precision: Precision) -> Table {
        let mut kept = Kept::default();
        let entries = self.entries(precision, &mut kept);
        entries.sort_unstable_by_key(|entry| u32::from(entry.freq) << 8 | u32::from(entry.symbol));
        debug_assert!(Table::new(precision, entries).is_ok());
        Table::of_valid(precision, entries)
    }

    /// The table's entries, in ascending order of symbols.
    fn entries<'a>(&self, precision: Precision, kept: &'a mut Kept) -> &'a mut [TableEntry] {
        let escape = self.choose(precision, kept);
        let entries = share(kept, precision.total() - escape);
        let lone_256 =
            precision == Precision::P8 && matches!(entries, [TableEntry { freq: 256, .. }]);
        if lone_256 {
            entries[0].freq = 255;
        }
        entries
    }

    /// Puts the symbols that get slots into `kept`, which is empty, in ascending order. Returns the
    /// frequency of the escape.
    fn choose(&self, precision: Precision, kept: &mut Kept) -> u32 {
        let n = self.total();
        let total = u64::from(precision.total());
        let (mut dropped, mut some_dropped) = (0, false);
        for (symbol, &count) in (0..=255).zip(&self.of) {
            if count > 0 && count * total * 5 >= n {
                kept.push(symbol, count);
            } else if count > 0 {
                (dropped, some_dropped) = (dropped + count, true);
            }
        }
        if n == 0 {
            return precision.total();
        }
        let mut escape = 0;
        if some_dropped || !self.complete {
            escape = ((total * dropped + n / 2) / n).max(1);
        }
        while kept.len as u64 > total - escape {
            kept.drop_rarest();
            escape = escape.max(1);
        }
        escape as u32
    }
}

/// Kept symbols in ascending order, with their counts and the entries that they become.
struct Kept {
    len: usize,
    counts: [u64; 256],
    entries: [TableEntry; 256],
}

impl Default for Kept {
    fn default() -> Self {
        Self { len: 0, counts: [0; 256], entries: [TableEntry::default(); 256] }
    }
}

impl Kept {
    fn push(&mut self, symbol: u8, count: u64) {
        self.counts[self.len] = count;
        self.entries[self.len].symbol = symbol;
        self.len += 1;
    }

    /// Drops the rarest symbol; of equally rare ones, the largest.
    fn drop_rarest(&mut self) {
        let rarest = (0..self.len).rev().min_by_key(|&i| self.counts[i]);
        if let Some(i) = rarest {
            self.counts.copy_within(i + 1..self.len, i);
            self.entries.copy_within(i + 1..self.len, i);
            self.len -= 1;
        }
    }
}

/// Shares `total` slots among the kept symbols: in proportion to their counts, rounded, then single
/// slots are moved where they help most.
fn share(kept: &mut Kept, total: u32) -> &mut [TableEntry] {
    let counts = &kept.counts[..kept.len];
    let entries = &mut kept.entries[..kept.len];
    let m: u64 = counts.iter().sum();
    let by_2m = Divisor::new(2 * m.max(1));
    let mut sum = 0;
    for (entry, &count) in entries.iter_mut().zip(counts) {
        let freq = by_2m.quotient(2 * count * u64::from(total) + m).max(1);
        entry.freq = freq as u16;
        sum += freq as u32;
    }
    if entries.is_empty() {
        return entries;
    }
    // The gain of each symbol from one more slot, or its loss with one less, with the best choice
    // on top. Of equal ones, that is the smallest symbol.
    if sum < total {
        let gain = |i: usize, freq: u16| counts[i] * 4096 / (2 * u64::from(freq) + 1);
        let worth = |(i, entry): (usize, &TableEntry)| (gain(i, entry.freq), Reverse(i));
        let mut best = BinaryHeap::from_iter(entries.iter().enumerate().map(worth));
        while sum < total {
            let Some(mut top) = best.peek_mut() else { break };
            let Reverse(i) = top.1;
            entries[i].freq += 1;
            top.0 = gain(i, entries[i].freq);
            sum += 1;
        }
    } else if sum > total {
        let loss = |i: usize, freq: u16| counts[i] * 4096 / (2 * u64::from(freq) - 1);
        // Every symbol keeps at least one slot.
        let several = entries.iter().enumerate().filter(|(_, entry)| entry.freq > 1);
        let worth = several.map(|(i, entry)| Reverse((loss(i, entry.freq), i)));
        let mut least = BinaryHeap::from_iter(worth);
        while sum > total {
            let Some(mut top) = least.peek_mut() else { break };
            let Reverse((_, i)) = *top;
            entries[i].freq -= 1;
            sum -= 1;
            match entries[i].freq {
                1 => drop(PeekMut::pop(top)),
                freq => top.0.0 = loss(i, freq),
            }
        }
    }
    entries
}

/// Divides by the same number many times: with a multiplication, where both numbers are below 2^32
/// (D. Lemire, O. Kaser, N. Kurz, "Faster remainder by direct computation", 2019).
struct Divisor {
    by: u64,
    /// 2^64 divided by `by`, rounded up; 0 means 2^64 itself.
    inverse: u64,
}

impl Divisor {
    /// A divisor by `by`, which must not be 0.
    fn new(by: u64) -> Self {
        Self { by, inverse: (u64::MAX / by).wrapping_add(1) }
    }

    fn quotient(&self, x: u64) -> u64 {
        if x.max(self.by) > u64::from(u32::MAX) || self.inverse == 0 {
            return x / self.by;
        }
        ((u128::from(x) * u128::from(self.inverse)) >> 64) as u64
    }
}

/// The ranges of a stream's symbols that are counted.
fn sampled(len: usize) -> impl Iterator<Item = Range<usize>> {
    let all = len <= COUNT_ALL;
    let windows = if all { 1 } else { len.div_ceil(WINDOW) };
    (0..windows).map(move |i| {
        if all {
            return 0..len;
        }
        let start = WINDOW * i + SAMPLE * (5 * i % 8);
        start.min(len)..(start + SAMPLE).min(len)
    })
}

/// Adds to counts that are kept in eight parts, so that the increments in a run of one symbol do
/// not wait for each other.
fn count(symbols: &[u8], parts: &mut [[u32; 256]; 8]) {
    let (groups, rest) = symbols.as_chunks::<8>();
    let mut zeros = 0;
    for group in groups {
        let group = u64::from_le_bytes(*group);
        // Planes of differences are often nearly all zeros: increments of one count wait for each other.
        if group == 0 {
            zeros += 1;
            continue;
        }
        for i in 0..8 {
            parts[i][usize::from((group >> (8 * i)) as u8)] += 1;
        }
    }
    parts.iter_mut().for_each(|part| part[0] += zeros);
    for &symbol in rest {
        parts[0][usize::from(symbol)] += 1;
    }
}

/// The entropy of the counted symbols, in bits, within a few parts in ten thousand: no order-0 code is
/// shorter.
pub fn entropy(counts: &Counts) -> u64 {
    entropy_of(&counts.of)
}

/// As [`entropy`], of counts of any symbols.
pub fn entropy_of<T: Copy + Into<u64>>(counts: &[T]) -> u64 {
    // Counts are scaled down to the range of `log2`, and no further than needed.
    let counts = counts.iter().map(|&n| n.into());
    let total: u64 = counts.clone().sum();
    let scale = 64u32.saturating_sub(total.leading_zeros()).saturating_sub(16);
    let log = |n: u64| {
        let n = ((n >> scale) as usize).max(1);
        // Most counts of a sample are small.
        LOG2.get(n).map_or_else(|| u64::from(fast_log2(n as u32)), |&log| u64::from(log))
    };
    let most = log(total);
    let sum = counts.filter(|&n| n > 0).map(|n| n.saturating_mul(most.saturating_sub(log(n))));
    sum.fold(0, u64::saturating_add).div_ceil(256)
}

/// The bits, rounded up, that data with these counts takes when coded with `table`, not counting
/// the table itself, states and padding; `u64::MAX` if a counted symbol cannot be coded.
///
/// A symbol in the table costs `P - log2(freq)` bits, any other 8 more than the escape. The
/// logarithms are fixed-point with 8 fractional bits, rounded to the nearest.
pub fn cost(counts: &Counts, table: &Table) -> u64 {
    cost_of(counts, table.precision(), table.entries(), table.escape().into())
}

/// As [`cost`], with the table that `expected` would give, without making it. The second number is
/// the size of that table in bytes.
pub fn cost_with(counts: &Counts, expected: &Counts, precision: Precision) -> (u64, usize) {
    let mut kept = Kept::default();
    let entries = &*expected.entries(precision, &mut kept);
    let slots: u32 = entries.iter().map(|entry| u32::from(entry.freq)).sum();
    let bits = cost_of(counts, precision, entries, precision.total() - slots);
    (bits, encoded_len(precision, entries.len()))
}

fn cost_of(counts: &Counts, precision: Precision, entries: &[TableEntry], escape: u32) -> u64 {
    let log2 = |freq: u32| LOG2.get(freq as usize).map_or(0, |&log2| u32::from(log2));
    let bits = |freq: u32| u64::from((precision.bits() << 8) - log2(freq));
    let (mut sum, mut rest) = (0u64, counts.total());
    for entry in entries {
        let count = counts.get(entry.symbol);
        sum = sum.saturating_add(count.saturating_mul(bits(entry.freq.into())));
        rest -= count;
    }
    match (rest, escape) {
        (0, _) => {}
        (_, 0) => return u64::MAX,
        (_, escape) => sum = sum.saturating_add(rest.saturating_mul(bits(escape) + (8 << 8))),
    }
    sum.div_ceil(256)
}

/// `256 * log2(v)`, to the nearest integer, of every frequency; that of 0 is unused.
static LOG2: [u16; FREQS] = {
    let mut table = [0; FREQS];
    let mut v = 1;
    while v < FREQS {
        table[v] = log2(v as u32) as u16;
        v += 1;
    }
    table
};
const FREQS: usize = (1 << 12) + 1;

/// `256 * log2(v)`, to the nearest integer, of `1 <= v < 2^16`.
const fn log2(v: u32) -> u32 {
    let whole = v.ilog2();
    ((whole << 9 | fraction((v as u64) << (31 - whole))) + 1) >> 1
}

/// As [`log2`], by a look-up in [`STEPS`].
fn fast_log2(v: u32) -> u32 {
    let v = v.clamp(1, u32::from(u16::MAX));
    let whole = v.ilog2();
    let mantissa = v << (15 - whole); // 1.15, in [1, 2)
    // The logarithm grows by less than two steps where the mantissa grows by one in 512.
    let (first, steps) = STEPS.0[(mantissa >> 6 & 511) as usize];
    let steps = steps.iter().map(|&step| u32::from(mantissa > u32::from(step))).sum::<u32>();
    ((whole << 9 | (u32::from(first) + steps)) + 1) >> 1
}

/// For each of 512 parts of the range of mantissas: the logarithm's fraction at its start, and the
/// 1.15 mantissas within the part after which the fraction grows by one.
static STEPS: Steps = Steps({
    let mut table = [(0, [u16::MAX; 2]); 512];
    let mut part = 0;
    while part < 512 {
        let start = (512 + part as u64) << 6;
        let first = fraction(start << 16);
        table[part].0 = first as u16;
        let mut step = 0;
        while step < 2 {
            // The last mantissa without a larger fraction is at least `low`, and below `high`.
            let (mut low, mut high) = (start, start + 64);
            while high - low > 1 {
                let middle = (low + high) / 2;
                let larger = fraction(middle << 16) > first + step as u32;
                (low, high) = if larger { (low, middle) } else { (middle, high) };
            }
            if high < start + 64 {
                table[part].1[step] = low as u16;
            }
            step += 1;
        }
        part += 1;
    }
    table
});
struct Steps([(u16, [u16; 2]); 512]);

/// The first 9 bits of the logarithm of a mantissa, 1.31 fixed-point and in [1, 2); by repeated squaring.
const fn fraction(mut mantissa: u64) -> u32 {
    let mut fraction = 0;
    let mut bits = 0;
    while bits < 9 {
        mantissa = (mantissa * mantissa) >> 31;
        let bit = mantissa >> 32;
        mantissa >>= bit;
        fraction = fraction << 1 | bit as u32;
        bits += 1;
    }
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(list: &[(u8, u64)]) -> Counts {
        let mut counts = Counts::new();
        list.iter().for_each(|&(symbol, n)| counts.add_symbol(symbol, n));
        counts
    }

    #[test]
    fn every_symbol_is_counted() {
        for len in [0, 7, 8, 40, 1001] {
            for zeros in [0, 1, 7, 9, 60] {
                let symbol = |i: usize| if i % 61 < zeros { 0 } else { (i * 7 % 251) as u8 };
                let symbols: Vec<u8> = (0..len).map(symbol).collect();
                let counts = Counts::of_all(&symbols);
                for of in 0..=255 {
                    let wanted = symbols.iter().filter(|s| **s == of).count();
                    assert_eq!(counts.get(of), wanted as u64, "{of} of {len}, {zeros}");
                }
            }
        }
    }

    #[test]
    fn logarithms_are_the_nearest() {
        for v in 1..=4096u32 {
            let exact = 256.0 * f64::from(v).log2();
            assert!((f64::from(log2(v)) - exact).abs() <= 0.5 + 1e-3, "{v}");
        }
        assert!((1..1 << 16).all(|v| fast_log2(v) == log2(v)));
    }

    #[test]
    fn divisions_are_exact() {
        let most = u64::from(u32::MAX);
        let some =
            [1, 2, 3, 5, 7, 10, 641, 1 << 16, (1 << 31) - 1, most - 1, most, most + 1, 1 << 40];
        for by in some {
            let divisor = Divisor::new(by);
            // On both sides of multiples.
            let near = some.iter().flat_map(|n| {
                let multiple = by.saturating_mul(*n);
                [*n, multiple - 1, multiple, multiple.saturating_add(1)]
            });
            for x in near.chain([0, u64::MAX]) {
                assert_eq!(divisor.quotient(x), x / by, "{x} / {by}");
            }
        }
    }

    /// The reference: every slot is given, or taken, where it helps most, with a new search each
    /// time.
    fn share_slowly(counts: &[u64], total: u32) -> Vec<u16> {
        let m: u64 = counts.iter().sum();
        let first = |c: &u64| ((2 * c * u64::from(total) + m) / (2 * m)).max(1);
        let mut freqs: Vec<u64> = counts.iter().map(first).collect();
        while freqs.iter().sum::<u64>() < u64::from(total) {
            let gain = |&i: &usize| counts[i] * 4096 / (2 * freqs[i] + 1);
            let best = (0..counts.len()).rev().max_by_key(gain).unwrap();
            freqs[best] += 1;
        }
        while freqs.iter().sum::<u64>() > u64::from(total) {
            let loss = |&i: &usize| counts[i] * 4096 / (2 * freqs[i] - 1);
            let least = (0..counts.len()).filter(|&i| freqs[i] > 1).min_by_key(loss).unwrap();
            freqs[least] -= 1;
        }
        freqs.iter().map(|f| *f as u16).collect()
    }

    #[test]
    fn slots_are_shared_as_the_specification_says() {
        let mut state = 1u64;
        for round in 0..400u64 {
            let len = 1 + (round * 37 % 256) as usize;
            let mut kept = Kept::default();
            for symbol in 0..len {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
                // From even to very uneven.
                kept.push(symbol as u8, 1 + (state >> 40) % (1 << (1 + round % 20)));
            }
            let counts = kept.counts[..len].to_vec();
            // There is a slot for each symbol that is kept.
            for total in [256, 255, 4096].into_iter().filter(|total| *total as usize >= len) {
                let mut kept = Kept { len, counts: kept.counts, ..Kept::default() };
                let freqs: Vec<u16> = share(&mut kept, total).iter().map(|e| e.freq).collect();
                assert_eq!(freqs, share_slowly(&counts, total), "{len} of {total}");
            }
        }
    }

    #[test]
    fn frequencies_fill_the_table() {
        let table = counts(&[(1, 1), (2, 3), (3, 60)]).table(Precision::P8);
        let freqs: Vec<_> = table.entries().iter().map(|e| (e.symbol, e.freq)).collect();
        assert_eq!(freqs, [(1, 4), (2, 12), (3, 240)]);
        assert_eq!(table.escape(), 0);
    }

    #[test]
    fn extremes_give_valid_tables() {
        let lone = counts(&[(9, 5)]).table(Precision::P8);
        assert_eq!(
            (lone.escape(), lone.entries()),
            (1, &[TableEntry { symbol: 9, freq: 255 }][..])
        );
        let lone = counts(&[(9, 5)]).table(Precision::P12);
        assert_eq!(
            (lone.escape(), lone.entries()),
            (0, &[TableEntry { symbol: 9, freq: 4096 }][..])
        );
        let none = Counts::new().table(Precision::P8);
        assert_eq!((none.escape(), none.entries().len()), (256, 0));
        let mut flat = Counts::new();
        (0..=255).for_each(|symbol| flat.add_symbol(symbol, 100));
        assert_eq!(flat.table(Precision::P8).entries().len(), 256);
        flat.complete = false;
        let table = flat.table(Precision::P8);
        assert_eq!((table.escape(), table.entries().len()), (1, 255));
        assert!(table.entries().iter().all(|e| e.symbol != 255), "the largest is dropped");
    }

    #[test]
    fn rare_symbols_are_escaped() {
        let table = counts(&[(0, 100_000), (1, 100_000), (2, 100)]).table(Precision::P8);
        assert_eq!((table.escape(), table.entries().len()), (1, 2));
    }

    #[test]
    fn long_streams_are_sampled_where_the_specification_says() {
        let mut data = vec![0u8; 8193];
        let windows = [(0, 0), (1, 5), (2, 2), (3, 7), (16, 0)];
        for (window, part) in windows {
            let start = 512 * window + 64 * part;
            let end = (start + 64).min(data.len());
            data[start..end].fill(1);
        }
        let counts = Counts::of_stream(&data);
        assert_eq!((counts.get(1), counts.total()), (4 * 64 + 1, 16 * 64 + 1));
        assert!(!counts.complete);
        assert!(Counts::of_stream(&data[..8192]).complete);
    }

    #[test]
    fn cost_is_the_sum_of_logarithms() {
        let counts = counts(&[(0, 128), (1, 64), (2, 64)]);
        let table = counts.table(Precision::P8);
        assert_eq!(cost(&counts, &table), 128 + 2 * 64 + 2 * 64);
        let other = Table::new(Precision::P8, &[TableEntry { symbol: 0, freq: 128 }]).unwrap();
        assert_eq!(cost(&counts, &other), 128 + 9 * 128);
        let full = Table::new(Precision::P12, &[TableEntry { symbol: 0, freq: 4096 }]).unwrap();
        assert_eq!(cost(&counts, &full), u64::MAX);
    }

    #[test]
    fn a_table_need_not_be_made_to_tell_its_cost() {
        let of = |seed: u64, many: u64| {
            let mut counts = Counts::new();
            let each = (0..=255u8).filter(|s| (u64::from(*s) * seed).is_multiple_of(3));
            each.for_each(|s| counts.add_symbol(s, u64::from(s) * seed % many));
            counts
        };
        for (seed, many) in [(1, 5), (3, 400), (7, 90_000), (9, 2)] {
            let symbols = of(seed, many);
            for expected in [symbols.clone(), symbols.clone().partial(), of(3, 77).partial()] {
                for precision in [Precision::P8, Precision::P12] {
                    let table = expected.table(precision);
                    let made = (cost(&symbols, &table), table.encoded_len());
                    assert_eq!(cost_with(&symbols, &expected, precision), made);
                }
            }
        }
    }
}
