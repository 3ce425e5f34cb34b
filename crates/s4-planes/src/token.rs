//! The layout `token`: a residual as one symbol and the bits below it.
//!
//! A zigzag integer `u` has a sign, `u & 1`, and a magnitude `m = u >> 1` of `n` bits. The token
//! holds the sign, `n`, and the [`top_bits`] bits below the leading one; a magnitude too short to
//! have them all is filled up with zeros on the right. The `n - 1 - top_bits` bits that are left,
//! if any, are appended to a bit stream, least significant bit first, element after element; the
//! last byte is filled up with zeros.
//!
//! ```text
//! m == 0:  token = sign
//! m != 0:  token = 2 * (1 + ((n - 1) << top_bits | top)) + sign
//! ```
//!
//! The tokens of every width fit a byte.

use s4_format::{Error, Result};

use crate::Width;

/// Number of a magnitude's bits, after the leading one, that are part of the token.
pub(crate) const fn top_bits(bytes: usize) -> u32 {
    match bytes {
        1 => 4,
        2 => 3,
        4 => 2,
        _ => 1,
    }
}

/// The most bits that one element can have in the bit stream.
const fn max_bits(bytes: usize) -> u32 {
    8 * bytes as u32 - 2 - top_bits(bytes)
}

/// The meaning of a token.
#[derive(Clone, Copy)]
struct Meaning {
    /// The zigzag integer, with zeros for the bits that are in the bit stream.
    base: u64,
    /// Number of bits in the bit stream, or [`INVALID`].
    bits: u8,
}

/// Marks a token that no element has.
const INVALID: u8 = u8::MAX;

const fn meaning(bytes: usize, token: u8) -> Meaning {
    let sign = (token & 1) as u64;
    if token < 2 {
        return Meaning { base: sign, bits: 0 };
    }
    let t = top_bits(bytes);
    let code = token as u32 / 2 - 1;
    let (below, top) = (code >> t, (code & ((1 << t) - 1)) as u64);
    let invalid = Meaning { base: 0, bits: INVALID };
    if below > 8 * bytes as u32 - 2 {
        return invalid;
    }
    if below >= t {
        let m = 1 << below | top << (below - t);
        return Meaning { base: m << 1 | sign, bits: (below - t) as u8 };
    }
    let filled = t - below;
    if top & ((1 << filled) - 1) != 0 {
        return invalid;
    }
    Meaning { base: (1 << below | top >> filled) << 1 | sign, bits: 0 }
}

const fn meanings(bytes: usize) -> [Meaning; 256] {
    let mut table = [Meaning { base: 0, bits: 0 }; 256];
    let mut token = 0;
    while token < 256 {
        table[token] = meaning(bytes, token as u8);
        token += 1;
    }
    table
}

/// The number of bits that an element with this token has in the bit stream; `None` if no element
/// of this width has the token.
pub fn token_bits(width: Width, token: u8) -> Option<u32> {
    let bits = meaning(width.bytes(), token).bits;
    (bits != INVALID).then_some(u32::from(bits))
}

/// The most bytes that the bit stream of `n` elements can have.
///
/// # Panics
/// If the size overflows.
pub fn token_bound(width: Width, n: usize) -> usize {
    // n elements of `8k + r` bits each.
    let bits = max_bits(width.bytes()) as usize;
    let whole = n.checked_mul(bits / 8).expect("size overflows");
    whole + n / 8 * (bits % 8) + (n % 8 * (bits % 8)).div_ceil(8)
}

/// Appends bits to a slice.
struct Writer<'a> {
    dst: &'a mut [u8],
    /// Whole bytes written.
    len: usize,
    /// The bits after those, fewer than 8; the byte that holds them is written as well.
    pending: u64,
    count: u32,
}

impl Writer<'_> {
    /// Appends the low `count` bits of `bits`, at most 56; the bits above are zero.
    #[inline(always)]
    fn push(&mut self, bits: u64, count: u32) {
        let pending = self.pending | bits << self.count;
        let bytes = pending.to_le_bytes();
        let room = &mut self.dst[self.len..];
        match room.first_chunk_mut() {
            Some(word) => *word = bytes,
            None => room.copy_from_slice(&bytes[..room.len()]),
        }
        let count = self.count + count;
        self.len += count as usize / 8;
        self.pending = pending >> (count / 8 * 8);
        self.count = count % 8;
    }

    /// The number of bytes written.
    fn finish(self) -> usize {
        self.len + usize::from(self.count > 0)
    }
}

/// The token of an element, its bits in the bit stream, and their number.
#[inline(always)]
fn encode<const W: usize>(element: &[u8; W]) -> (u8, u64, u32) {
    let t = top_bits(W);
    let mut u = [0; 8];
    u[..W].copy_from_slice(element);
    let u = u64::from_le_bytes(u);
    let (m, sign) = (u >> 1, u as u8 & 1);
    let below = 63 - (m | 1).leading_zeros();
    let top = (m << t) >> below & ((1 << t) - 1);
    let symbol = 2 + 2 * ((below as u8) << t | top as u8);
    let count = below.saturating_sub(t);
    (if m == 0 { 0 } else { symbol } | sign, m & ((1 << count) - 1), count)
}

/// Splits a group of elements with at most 56 bits in the bit stream, or a single element.
#[inline(always)]
fn split_group<const W: usize>(elements: &[[u8; W]], tokens: &mut [u8], writer: &mut Writer<'_>) {
    let (mut word, mut total) = (0, 0);
    for (element, token) in elements.iter().zip(tokens) {
        let (symbol, bits, count) = encode(element);
        *token = symbol;
        word |= bits << total;
        total += count;
    }
    if W == 8 {
        let low = total.min(32);
        writer.push(word & 0xffff_ffff, low);
        writer.push(word >> 32, total - low);
    } else {
        writer.push(word, total);
    }
}

/// Splits zigzag integers into tokens and the bit stream, whose length is returned. `G` elements
/// have at most 56 bits in the bit stream, or `G` is 1.
#[inline(always)]
fn split_groups<const W: usize, const G: usize>(
    src: &[u8],
    tokens: &mut [u8],
    bits: &mut [u8],
) -> usize {
    const { assert!(G == 1 || G as u32 * max_bits(W) <= 56) };
    let mut writer = Writer { dst: bits, len: 0, pending: 0, count: 0 };
    let (groups, rest) = src.as_chunks::<W>().0.as_chunks::<G>();
    let (token_groups, rest_tokens) = tokens.as_chunks_mut::<G>();
    for (group, tokens) in groups.iter().zip(token_groups) {
        split_group(group, tokens, &mut writer);
    }
    split_group(rest, rest_tokens, &mut writer);
    writer.finish()
}

/// At least 57 bits from bit `at` on; zeros after the end.
#[inline(always)]
fn peek(bits: &[u8], at: usize) -> u64 {
    let start = (at / 8).min(bits.len());
    let word = match bits[start..].first_chunk() {
        Some(word) => u64::from_le_bytes(*word),
        None => {
            let mut word = [0; 8];
            word[..bits.len() - start].copy_from_slice(&bits[start..]);
            u64::from_le_bytes(word)
        }
    };
    word >> (at % 8)
}

/// Checks that every token is valid, and that the bit stream has the length that they add up to.
fn check(table: &[Meaning; 256], tokens: &[u8], bits: &[u8]) -> Result<()> {
    let mut total = 0_u64;
    let mut all_valid = true;
    for token in tokens {
        let count = table[usize::from(*token)].bits;
        all_valid &= count != INVALID;
        total += u64::from(count);
    }
    if !all_valid {
        return Err(Error::corrupt("invalid token"));
    }
    let expected = total.div_ceil(8);
    let found = bits.len() as u64;
    if found < expected {
        let what = format!("the tokens need {expected} bytes of bits, found {found}");
        return Err(Error::truncated(what));
    }
    if found > expected {
        let what = format!("the tokens leave {} bytes of bits unused", found - expected);
        return Err(Error::corrupt(what));
    }
    let used = total % 8;
    if used != 0 && bits.last().is_some_and(|last| last >> used != 0) {
        return Err(Error::corrupt("the unused bits after the last element are not zero"));
    }
    Ok(())
}

/// Undoes [`split_group`]; returns how many bits were used.
#[inline(always)]
fn merge_group<const W: usize>(
    table: &[Meaning; 256],
    tokens: &[u8],
    mut word: u64,
    elements: &mut [[u8; W]],
) -> usize {
    let mut total = 0;
    for (token, element) in tokens.iter().zip(elements) {
        let Meaning { base, bits: count } = table[usize::from(*token)];
        let u = base | (word & ((1 << count) - 1)) << 1;
        element.copy_from_slice(&u.to_le_bytes()[..W]);
        word >>= count;
        total += usize::from(count);
    }
    total
}

/// Undoes [`split_groups`].
#[inline(always)]
fn merge_groups<const W: usize, const G: usize>(
    tokens: &[u8],
    bits: &[u8],
    dst: &mut [u8],
) -> Result<()> {
    let table = const { &meanings(W) };
    check(table, tokens, bits)?;
    let mut at = 0;
    let word = |at: usize| match W {
        8 => peek(bits, at) & 0xffff_ffff | peek(bits, at + 32) << 32,
        _ => peek(bits, at),
    };
    let (groups, rest) = dst.as_chunks_mut::<W>().0.as_chunks_mut::<G>();
    let (token_groups, rest_tokens) = tokens.as_chunks::<G>();
    for (tokens, group) in token_groups.iter().zip(groups) {
        at += merge_group(table, tokens, word(at), group);
    }
    merge_group(table, rest_tokens, word(at), rest);
    Ok(())
}

/// The portable body of [`crate::Kernels::split_token`].
#[inline(always)]
pub(crate) fn split(width: Width, src: &[u8], tokens: &mut [u8], bits: &mut [u8]) -> usize {
    match width {
        Width::B1 => split_groups::<1, 8>(src, tokens, bits),
        Width::B2 => split_groups::<2, 4>(src, tokens, bits),
        Width::B4 => split_groups::<4, 2>(src, tokens, bits),
        Width::B8 => split_groups::<8, 1>(src, tokens, bits),
    }
}

/// The portable body of [`crate::Kernels::merge_token`].
#[inline(always)]
pub(crate) fn merge(width: Width, tokens: &[u8], bits: &[u8], dst: &mut [u8]) -> Result<()> {
    match width {
        Width::B1 => merge_groups::<1, 8>(tokens, bits, dst),
        Width::B2 => merge_groups::<2, 4>(tokens, bits, dst),
        Width::B4 => merge_groups::<4, 2>(tokens, bits, dst),
        Width::B8 => merge_groups::<8, 1>(tokens, bits, dst),
    }
}
