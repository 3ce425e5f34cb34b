//! Codeword lengths from counts, and codewords from lengths.

use super::code::{LITLEN, MAX_BITS, count_lengths, first_codes};

/// Codeword lengths, at most `max` bits, of a complete code for symbols with these counts. Symbols
/// that do not occur have none, except that there are always at least two codewords.
pub(super) fn lengths(counts: &[u32], lengths: &mut [u8], max: usize) {
    lengths.fill(0);
    // (count, symbol), ascending: equal counts are ordered by symbol, so that the result is unique.
    let mut used: Vec<(u32, u16)> = Vec::with_capacity(LITLEN);
    used.extend((0u16..).zip(counts).filter(|(_, c)| **c > 0).map(|(s, c)| (*c, s)));
    if used.len() < 2 {
        let other = used.first().map_or(0, |(_, s)| *s);
        lengths[usize::from(other)] = 1;
        lengths[usize::from(other == 0)] = 1;
        return;
    }
    used.sort_unstable();
    let mut per_length = tree_depths(&used, max);
    shorten(&mut per_length, max);
    // The rarest symbols get the longest codewords.
    let mut symbols = used.iter();
    for bits in (1..=max).rev() {
        for (_, symbol) in symbols.by_ref().take(per_length[bits] as usize) {
            lengths[usize::from(*symbol)] = bits as u8;
        }
    }
}

/// The number of leaves of the optimal tree at each depth, those deeper than `max` counted at
/// `max`.
fn tree_depths(used: &[(u32, u16)], max: usize) -> [u32; MAX_BITS + 1] {
    // Two queues: leaves in order of count, and inner nodes in the order in which they are made,
    // which is that of their counts. Node `n` < leaves is a leaf.
    let leaves = used.len();
    let mut weights: Vec<u64> = used.iter().map(|(c, _)| u64::from(*c)).collect();
    let mut parents = vec![0usize; 2 * leaves - 1];
    let (mut leaf, mut inner) = (0, leaves);
    for node in leaves..2 * leaves - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            let take_leaf = leaf < leaves && (inner == node || weights[leaf] <= weights[inner]);
            let child = if take_leaf { &mut leaf } else { &mut inner };
            weight += weights[*child];
            parents[*child] = node;
            *child += 1;
        }
        weights.push(weight);
    }
    let mut depths = vec![0u32; 2 * leaves - 1];
    let mut per_length = [0; MAX_BITS + 1];
    for node in (0..2 * leaves - 2).rev() {
        depths[node] = depths[parents[node]] + 1;
        if node < leaves {
            per_length[max.min(depths[node] as usize)] += 1;
        }
    }
    per_length
}

/// Makes the code complete again after codewords were cut to `max` bits.
fn shorten(per_length: &mut [u32; MAX_BITS + 1], max: usize) {
    let mut used: u32 = (1..=max).map(|bits| per_length[bits] << (max - bits)).sum();
    while used > 1 << max {
        // Moves one of the longest codewords next to the longest of the shorter ones, which gets
        // one bit longer.
        per_length[max] -= 1;
        if let Some(bits) = (1..max).rev().find(|bits| per_length[*bits] > 0) {
            per_length[bits] -= 1;
            per_length[bits + 1] += 2;
        }
        used -= 1;
    }
}

/// Codewords in the order in which their bits are written, for symbols with these lengths.
pub(super) fn codewords(lengths: &[u8], codewords: &mut [u16]) {
    let mut counts = count_lengths(lengths);
    counts[0] = 0;
    let mut next = first_codes(&counts);
    for (codeword, &bits) in codewords.iter_mut().zip(lengths).filter(|(_, bits)| **bits > 0) {
        *codeword = next[usize::from(bits)].reverse_bits() >> (16 - bits);
        next[usize::from(bits)] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(counts: &[u32], max: usize) -> Vec<u8> {
        let mut out = vec![9; counts.len()];
        lengths(counts, &mut out, max);
        out
    }

    #[test]
    fn codes_are_complete_and_within_their_limit() {
        let fibonacci: Vec<u32> = std::iter::successors(Some((1, 1)), |(a, b)| Some((*b, a + b)))
            .map(|p| p.0)
            .take(40)
            .collect();
        let flat = vec![1; 288];
        let steep: Vec<u32> = (0..30).map(|i| 1 << i).collect();
        for counts in [&fibonacci, &flat, &steep, &vec![0, 5, 0], &vec![0; 4], &vec![7, 0, 0, 1]] {
            for max in [9, 15] {
                let made = made(counts, max);
                let used: u32 = made.iter().filter(|b| **b > 0).map(|b| 1 << (15 - b)).sum();
                assert_eq!(used, 1 << 15, "{counts:?}");
                assert!(made.iter().all(|b| usize::from(*b) <= max));
                let coded = |(c, b): (&u32, &u8)| *c == 0 || *b > 0;
                assert!(counts.iter().zip(&made).all(coded));
            }
        }
    }

    #[test]
    fn the_code_is_the_best_one() {
        assert_eq!(made(&[45, 13, 12, 16, 9, 5], 15), [1, 3, 3, 3, 4, 4]);
        assert_eq!(made(&[1, 1, 2, 4], 15), [3, 3, 2, 1]);
    }

    #[test]
    fn codewords_are_in_order() {
        // The example of RFC 1951, section 3.2.2, with the bits reversed.
        let mut words = [0; 8];
        codewords(&[3, 3, 3, 3, 3, 2, 4, 4], &mut words);
        assert_eq!(words, [0b010, 0b110, 0b001, 0b101, 0b011, 0b00, 0b0111, 0b1111]);
    }
}
