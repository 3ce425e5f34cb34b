//! Shared by the tests of row and column offsets.

/// Bytes before the offsets.
const HEADER: usize = 24;

/// The little-endian integer in `bytes`.
pub(crate) fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |all, b| all << 8 | u64::from(*b))
}

/// Side data with these offsets, and base, shift and share.
pub(crate) fn side(rows: &[i16], cols: &[i16], (base, shift, share): (u64, u8, u8)) -> Vec<u8> {
    let mut out = (rows.len() as u32).to_le_bytes().to_vec();
    out.extend((cols.len() as u32).to_le_bytes());
    out.extend(base.to_le_bytes());
    out.extend([shift, share, 0, 0, 0, 0, 0, 0]);
    rows.iter().chain(cols).for_each(|o| out.extend(o.to_le_bytes()));
    out
}

/// The bytes of the example on a page of the documentation.
pub(crate) fn example(page: &str) -> Vec<u8> {
    page.lines()
        .filter(|line| line.starts_with("    ") && line.contains('|'))
        .flat_map(|line| line.split('|').next().unwrap_or_default().split_whitespace())
        .map(|byte| u8::from_str_radix(byte, 16).expect("a byte"))
        .collect()
}

/// The prediction of value `i`, which has `bits` bits, from the parent's value, as specified.
pub(crate) fn predicted(bits: u32, side: &[u8], i: usize, parent: u64) -> u64 {
    let offset = |i: usize| i128::from(word(&side[HEADER + 2 * i..][..2]) as u16 as i16);
    let (rows, cols) = (word(&side[..4]) as usize, word(&side[4..8]) as usize);
    let (row, col) = (offset(i / cols), offset(rows + i % cols));
    let modulus = 1i128 << (bits - 1);
    let share = i128::from(parent) % modulus * i128::from(side[17]) / 256;
    let sum = i128::from(word(&side[8..16])) + ((row + col) << side[16]) + share;
    if row == -32768 { 0 } else { sum.rem_euclid(modulus) as u64 }
}
