//! The coding of a plane, and its cost.

use s4_codec_cpu::rans::{Counts, Precision, cost_with, entropy};
use s4_format::CodecId;
use s4_format::limits::MAX_TABLES;

use super::counted::{CountedPlane, unseen};
use crate::PlaneCoding;

// Thresholds are parts of the compared quantities: 128 means one in 128.

/// A plane that entropy coding makes smaller by less than this part is noise, and not worth the time.
const NOISE_GAIN: u64 = 50;
/// Parts of a sample that are counted separately.
const PARTS: usize = 8;

/// The number that one occurrence of a symbol counts as where counts are averaged.
const SMOOTH: u64 = 64;

/// A symbol has up to 31 neighbours on each side. 2^33 divided by the number of symbols averaged,
/// rounded up: its product with a number below 2^26 is too large by less than 1/128, and a quotient
/// by 63 or less is never closer than 1/63 to the next integer.
const INVERSE_BITS: u32 = 33;
const INVERSES: [u64; 64] = {
    let mut out = [0; 64];
    let mut n = 1;
    while n < 64 {
        out[n] = (1u64 << INVERSE_BITS).div_ceil(n as u64);
        n += 1;
    }
    out
};

/// The coding chosen for a plane.
pub(super) struct PlannedPlane {
    pub(super) coding: PlaneCoding,
    /// The counts of each context, or of all symbols.
    pub(super) counts: Vec<Counts>,
    /// Whether the symbols have contexts that are ignored.
    pub(super) one_table: bool,
    pub(super) noise: bool,
    /// For symbols with contexts: what to remember.
    pub(super) known: Option<KnownPlane>,
}

/// The tables that a plane with contexts is coded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tables {
    /// None: it is noise.
    None,
    /// One, whatever the contexts.
    One,
    /// One for each context.
    Several,
}

/// Findings about a plane with contexts in a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KnownPlane {
    tables: Tables,
    /// The entropies of all contexts, in bits: quick to compute.
    entropies: u64,
    /// The same with the cost of tables.
    bits: u64,
}

/// Remembered findings about a plane.
#[derive(Debug, Clone, Copy)]
pub(super) struct RememberedPlane {
    pub(super) plane: KnownPlane,
    /// It is reused while the entropy is within this many bits of the earlier one.
    pub(super) within: u64,
    /// Whether it was found for the same tensor, at the same distance to its parent.
    pub(super) is_own: bool,
}

impl RememberedPlane {
    /// The findings about a plane whose contexts now have these entropies; `None` if they may not be reused.
    fn known(self, entropies: u64) -> Option<KnownPlane> {
        let Self { plane, within, is_own } = self;
        let holds = entropies.abs_diff(plane.entropies) <= within;
        match is_own {
            true => holds.then_some(plane),
            // A plane that is noise in one tensor need not be noise in another.
            false => (holds && plane.tables != Tables::None).then(|| KnownPlane {
                entropies,
                bits: plane.bits_of(entropies),
                ..plane
            }),
        }
    }
}

impl KnownPlane {
    /// The bits if the plane is coded the same way again, taking the cost of tables as unchanged.
    fn bits_of(&self, entropies: u64) -> u64 {
        match self.tables {
            Tables::None => self.bits,
            _ => (self.bits + entropies).saturating_sub(self.entropies),
        }
    }
}

/// The precision of a plane that is coded by rANS.
pub(super) fn precision(coding: PlaneCoding) -> Option<Precision> {
    let param = (coding.codec == CodecId::RANS).then_some(coding.param)?;
    Precision::from_param(param).ok()
}

/// A plane that is constant in the sample may have other symbols elsewhere, usually few: plan it as coded.
pub(super) fn expect_changes(plane: &mut PlannedPlane) {
    let PlannedPlane { coding, counts, noise, .. } = plane;
    let constant = |c: &Counts| (0..=255).any(|s| c.get(s) == c.total());
    if *coding == PlaneCoding::RAW && !*noise && counts.iter().all(constant) {
        *coding = PlaneCoding::RANS8;
    }
}

/// The cost of signs if some chunks have only one sign, as the moments in a buffer of weights and
/// moments do. `run`: values in each run of the sample.
pub(super) fn bits_of_signs(plane: &[u8], run: u64) -> u64 {
    let varies = |run: &&[u8]| run.iter().any(|b| *b != run[0]);
    plane.chunks(run as usize / 8).filter(varies).map(|run| 8 * run.len() as u64).sum()
}

/// The coding of a plane, its estimated cost in bits, and the bytes of its table, if it has one. `may_lose`: the bits
/// that faster coding in pairs may lose, given the plane's bits. `stored`: the bits to count for a table of the given
/// bytes.
pub(super) fn choose(
    (plane, counted): (&[u8], &CountedPlane),
    dense: bool,
    may_lose: impl Fn(u64) -> u64,
    stored: impl Fn(usize) -> u64,
) -> (PlannedPlane, u64, usize) {
    let CountedPlane { counts, least } = counted;
    let least = *least;
    let (raw, noise) = noise(plane, dense);
    let (coding, cost, table) = if is_constant(plane) {
        // Wherever the plane is constant it is stored as its constant.
        (PlaneCoding::RAW, 0, 0)
    } else if !is_worth(least, raw) {
        (noise, raw, 0)
    } else {
        let (pairs, table) = cost_with(counts, counts, Precision::P8);
        let much_less = (pairs + stored(table)).saturating_sub(may_lose(pairs));
        let singles = (least < much_less).then(|| cost_with(counts, counts, Precision::P12));
        let (coding, cost, table) = match singles {
            Some((singles, table)) if singles + stored(table) < much_less => {
                (PlaneCoding::RANS12, singles, table)
            }
            _ => (PlaneCoding::RANS8, pairs, table),
        };
        if is_worth(cost, raw) { (coding, cost, table) } else { (noise, raw, 0) }
    };
    let noise = cost == 8 * plane.len() as u64;
    let counts = vec![counts.clone()];
    (PlannedPlane { coding, counts, one_table: false, noise, known: None }, cost, table)
}

/// As [`choose`], for symbols with contexts. `values`: values of the tensor, which stores the tables once. `smooth`:
/// the distance between large symbols that are about equally frequent, and how many bits a single table, which is
/// faster, may lose. `shared`: whether chunks share the tables. `known`: remembered findings about such a plane;
/// nothing else is compared while they may be reused.
pub(super) fn choose_in_context(
    (plane, contexts): (&[u8], &[u8]),
    dense: bool,
    values: u64,
    (smooth, shared): (Option<(usize, u64)>, bool),
    known: Option<RememberedPlane>,
) -> (PlannedPlane, u64) {
    let (raw, noise) = noise(plane, dense);
    let seen = counts_of(plane, contexts);
    let entropies = seen.iter().map(entropy).sum::<u64>();
    let known = known.and_then(|known| known.known(entropies));
    let planned = |tables, bits, counts| {
        let noise_planned = tables == Tables::None && raw == 8 * plane.len() as u64;
        let coding = if tables == Tables::None { noise } else { PlaneCoding::RANS8 };
        let one_table = tables == Tables::One;
        let known = Some(known.unwrap_or(KnownPlane { tables, entropies, bits }));
        (PlannedPlane { coding, counts, one_table, noise: noise_planned, known }, bits)
    };
    let as_noise = |counts| planned(Tables::None, raw, counts);
    // Making tables takes most of the time, and no table makes noise smaller.
    if !is_worth(entropies + seen.iter().map(unseen).sum::<u64>(), raw) {
        return as_noise(seen);
    }
    let all = || {
        let mut all = Counts::new();
        seen.iter().for_each(|c| all.add(c));
        all
    };
    // Chunks then use only the tensor's tables, so every possible context needs one.
    let smoothed_each = |alike| -> Vec<_> {
        let each = (0..MAX_TABLES).map(|i| seen.get(i).map(|c| smoothed(c, alike)));
        each.map(Option::unwrap_or_default).collect()
    };
    if let Some(known) = known {
        let counts = match (known.tables, smooth) {
            (Tables::One, Some((alike, _))) if shared => vec![smoothed(&all(), alike)],
            (Tables::Several, Some((alike, _))) if shared => smoothed_each(alike),
            (Tables::One, _) => vec![all()],
            _ => seen,
        };
        return planned(known.tables, known.bits_of(entropies), counts);
    }
    let bits = |counts: &Counts, expected: &Counts| {
        let (bits, table) = cost_with(counts, expected, Precision::P8);
        let unseen = if smooth.is_some() { 0 } else { unseen(counts) };
        bits + 8 * table as u64 * plane.len() as u64 / values.max(1) + unseen
    };
    let (tables, cost, counts) = match smooth {
        None => {
            let cost = seen.iter().filter(|c| c.total() > 0).map(|c| bits(c, c)).sum();
            (Tables::Several, cost, seen)
        }
        Some((alike, may_lose)) => {
            let all = all();
            let single = smoothed(&all, alike);
            let of_single = bits(&all, &single);
            // Several tables must take less than this, and cannot take less than the entropy.
            let enough = of_single.saturating_sub(may_lose);
            let (mut cost, mut expected) = (entropies, vec![]);
            if entropies < enough {
                expected = smoothed_each(alike);
                let each = seen.iter().zip(&expected).filter(|(c, _)| c.total() > 0);
                cost = each.map(|(c, expected)| bits(c, expected)).sum();
            }
            match cost < enough {
                true => (Tables::Several, cost, expected),
                false => (Tables::One, of_single, vec![single]),
            }
        }
    };
    if !is_worth(cost, raw) {
        return as_noise(counts);
    }
    planned(tables, cost, counts)
}

/// The bits of a plane, in a sample of `values` values, if each of the tensor's `chunks` chunks (of 2^`chunk_log2`
/// values) has its own tables. Chunks that differ much from the others, as in a buffer of weights and moments, are
/// stored that way.
pub(super) fn by_own_tables(
    (plane, values): (&[u8], usize),
    contexts: &[u8],
    precision: Precision,
    (chunks, chunk_log2): (u64, u8),
) -> u64 {
    let parts = PARTS.min(chunks.max(1) as usize);
    let part = plane.len().div_ceil(parts).max(1);
    let mut bits = 0;
    for (i, symbols) in plane.chunks(part).enumerate() {
        let seen = counts_of(symbols, contexts.get(i * part..).unwrap_or_default());
        for counts in seen.iter().filter(|c| c.total() > 0) {
            let (coded, table) = cost_with(counts, counts, precision);
            bits += coded + unseen(counts) + ((8 * table * values / parts) as u64 >> chunk_log2);
        }
    }
    bits
}

/// The counts of each symbol in each context; without contexts, all symbols count as one context.
fn counts_of(symbols: &[u8], contexts: &[u8]) -> Vec<Counts> {
    if contexts.is_empty() {
        return vec![Counts::of_all(symbols)];
    }
    let last = contexts.iter().fold(0, |a, b| a.max(*b));
    let len = symbols.len().min(contexts.len());
    Counts::of_all_in_contexts(&symbols[..len], &contexts[..len], 1 + usize::from(last))
}

/// Whether all symbols are equal.
fn is_constant(plane: &[u8]) -> bool {
    // Compared with itself, one symbol on: that takes vector instructions.
    plane.is_empty() || plane[1..] == plane[..plane.len() - 1]
}

/// Smooths counts to allow for symbols that the sample missed: each becomes the mean of the counts
/// of its neighbours, whose range grows in proportion to the symbol, as on a logarithmic scale.
/// Only every `alike`th symbol, 1 or 2, is a neighbour.
fn smoothed(counts: &Counts, alike: usize) -> Counts {
    match alike {
        2 => smoothed_by::<2>(counts),
        _ => smoothed_by::<1>(counts),
    }
}

fn smoothed_by<const ALIKE: usize>(counts: &Counts) -> Counts {
    let mut out = Counts::new();
    let total = counts.total();
    if total == 0 {
        return out;
    }
    // Running sums, after leading zeros: of a symbol and its neighbours below.
    let mut sums = [0; 256 + 2];
    for symbol in 0..=255u8 {
        let at = usize::from(symbol);
        sums[at + ALIKE] = counts.get(symbol) + sums[at];
    }
    let is_small = total < (1 << 26) / SMOOTH;
    for symbol in 0..=255u8 {
        let at = usize::from(symbol);
        let reach = at / (8 * ALIKE);
        let above = reach.min((255 - at) / ALIKE);
        let sum = SMOOTH * (sums[at + (above + 1) * ALIKE] - sums[at - reach * ALIKE]);
        let near = reach + above + 1;
        // A division would take several times as long.
        let mean = match is_small {
            true => (sum * INVERSES[near]) >> INVERSE_BITS,
            false => sum / near as u64,
        };
        out.add_symbol(symbol, mean);
    }
    out
}

/// The bits of a plane that is noise, and its coding.
fn noise(plane: &[u8], dense: bool) -> (u64, PlaneCoding) {
    let raw = plane.len() as u64 * if dense { 7 } else { 8 };
    (raw, if dense { PlaneCoding::BITS7 } else { PlaneCoding::RAW })
}

/// Whether a plane becomes so much smaller that it is worth the time.
fn is_worth(bits: u64, raw: u64) -> bool {
    bits < raw - raw / NOISE_GAIN
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plane whose symbols are within `spread` of what their contexts predict.
    fn plane(spread: u32) -> (Vec<u8>, Vec<u8>) {
        let noise = |i: u32| i.wrapping_mul(2_654_435_761) >> 16;
        (0..16_384).map(|i| ((i % 4 * 40 + noise(i) % spread) as u8, (i % 4) as u8)).unzip()
    }

    #[test]
    fn what_is_known_of_a_plane_is_used_while_its_entropy_is_about_what_it_was() {
        let choose = |(symbols, contexts): &(Vec<u8>, Vec<u8>),
                      known: Option<(KnownPlane, u64)>| {
            let tables = (Some((1, 0)), true);
            let own = |(plane, within)| RememberedPlane { plane, within, is_own: true };
            let known = known.map(own);
            choose_in_context((symbols, contexts), false, 1 << 20, tables, known)
        };
        let (before, bits) = choose(&plane(8), None);
        let found = before.known.unwrap();
        assert_eq!((found.tables, found.bits), (Tables::Several, bits));
        // Tables other than a search would find show that there was no search.
        let known = KnownPlane { tables: Tables::One, ..found };
        let (again, bits_again) = choose(&plane(8), Some((known, 100)));
        assert!(again.one_table && again.counts.len() == 1 && bits_again == bits);
        assert_eq!(again.known, Some(known));
        // A plane whose entropy differs by more than the given bits is searched as if nothing were known.
        let (other, of_other) = choose(&plane(16), Some((known, 100)));
        let (fresh, of_fresh) = choose(&plane(16), None);
        assert!(!other.one_table && of_other == of_fresh && other.known == fresh.known);
        assert_ne!(other.known, Some(known));
    }

    #[test]
    fn what_is_known_of_another_tensor_is_made_to_fit_and_never_says_that_a_plane_is_noise() {
        let entropies = 10_000;
        let of = |tables| KnownPlane { tables, entropies, bits: 10_500 };
        let other = |plane| RememberedPlane { plane, within: 1000, is_own: false };
        let found = other(of(Tables::Several)).known(10_700);
        assert_eq!(
            found,
            Some(KnownPlane { entropies: 10_700, bits: 11_200, ..of(Tables::Several) })
        );
        assert_eq!(other(of(Tables::Several)).known(11_001), None);
        assert_eq!(other(of(Tables::None)).known(10_000), None);
        let own = RememberedPlane { is_own: true, ..other(of(Tables::None)) };
        assert_eq!(own.known(10_700), Some(of(Tables::None)));
    }
}
