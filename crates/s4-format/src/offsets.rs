//! Row and column offsets, packed into few bits on disk. In memory they have 16 bits each.
//!
//! Most offsets need far fewer than 16 bits, and a few are large, so each is stored as a Rice code:
//! a run of zeros gives the upper part of a number in unary, and its low bits follow (R. F. Rice,
//! "Some practical universal noiseless coding techniques", 1979). docs/predictors/offsets.md
//! specifies the bits.

use crate::error::{Error, Result};
use crate::limits::MAX_SIDE;

/// Bytes before the offsets, in both forms. They start with the numbers of rows and columns.
const HEADER: usize = 24;
/// This many zeros mean that all 16 bits of the number follow.
const ESCAPE: u16 = 8;

/// The offsets of rows, and of columns.
type Sides<'a> = [&'a [[u8; 2]]; 2];

/// Packs offsets into few bits. `None` if that takes no fewer bytes, or if there are not as many
/// offsets as the header says.
pub fn pack(offsets: &[u8]) -> Option<Vec<u8>> {
    let (header, sides) = sides(offsets)?;
    let low = sides.map(fewest);
    let bits: usize = low.iter().map(|low| low.1).sum();
    if HEADER + 2 + bits.div_ceil(8) >= offsets.len() {
        return None;
    }
    let mut out = Vec::with_capacity(HEADER + 2 + bits.div_ceil(8) + 8);
    out.extend_from_slice(header);
    out.extend(low.map(|(low, _)| low as u8));
    let (mut word, mut used) = (0u64, 0);
    for (side, (low, _)) in sides.iter().zip(low) {
        for offset in *side {
            let (code, len) = coded(number(*offset), low);
            word |= code << used;
            used += len;
            if used >= 32 {
                out.extend((word as u32).to_le_bytes());
                (word, used) = (word >> 32, used - 32);
            }
        }
    }
    out.extend_from_slice(&word.to_le_bytes()[..used.div_ceil(8) as usize]);
    Some(out)
}

/// Bytes that offsets take on disk.
pub fn stored_len(offsets: &[u8]) -> usize {
    let Some((_, sides)) = sides(offsets) else { return offsets.len() };
    let bits: usize = sides.map(|side| fewest(side).1).iter().sum();
    offsets.len().min(HEADER + 2 + bits.div_ceil(8))
}

/// Undoes [`pack`]: the offsets in 16 bits each.
///
/// # Errors
/// `Truncated`, `Corrupt`; `Limit` if there are more offsets than side data has room for.
pub fn unpack(packed: &[u8]) -> Result<Vec<u8>> {
    let short = || Error::truncated("packed offsets end too early");
    let (header, rest) = packed.split_first_chunk::<HEADER>().ok_or_else(short)?;
    let ([rows_low, cols_low], bits) = rest.split_first_chunk().ok_or_else(short)?;
    let [rows, cols] = lens(header);
    let need = HEADER as u64 + 2 * (rows + cols);
    if need > MAX_SIDE as u64 {
        return Err(Error::limit(format!(
            "offsets of {rows} rows and {cols} columns take {need} bytes, at most {MAX_SIDE} allowed"
        )));
    }
    // Each offset takes at least one bit. Checking this first keeps a false count from reserving
    // memory.
    if rows + cols > 8 * bits.len() as u64 {
        return Err(short());
    }
    let mut out = Vec::with_capacity(need as usize);
    out.extend_from_slice(header);
    let mut bits = Bits { bytes: bits, word: 0, held: 0 };
    for (count, low) in [(rows, *rows_low), (cols, *cols_low)] {
        if low > 15 {
            return Err(Error::corrupt(format!(
                "packed offsets have {low} low bits, at most 15 allowed"
            )));
        }
        for _ in 0..count {
            let number = bits.number(low.into()).ok_or_else(short)?;
            out.extend(offset(number).to_le_bytes());
        }
    }
    if !bits.bytes.is_empty() || bits.held > 7 || bits.word != 0 {
        return Err(Error::corrupt("unexpected data after packed offsets"));
    }
    Ok(out)
}

/// Splits offsets into the header, those of the rows and those of the columns. `None` if they are
/// not as many as the header says.
fn sides(offsets: &[u8]) -> Option<(&[u8; HEADER], Sides<'_>)> {
    let (header, rest) = offsets.split_first_chunk::<HEADER>()?;
    let [rows, cols] = lens(header);
    let whole = rest.len() as u64 == 2 * (rows + cols);
    let (all, rows) = (rest.as_chunks().0, usize::try_from(rows).ok()?);
    whole.then(|| all.split_at(rows)).map(|(rows, cols)| (header, [rows, cols]))
}

fn lens(header: &[u8; HEADER]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, ..] = *header;
    [[a, b, c, d], [e, f, g, h]].map(|len| u32::from_le_bytes(len).into())
}

/// The number that an offset is coded as: 0 for that of a row that predicts nothing, which may be
/// frequent; otherwise the larger, the farther the offset is from 0.
fn number(offset: [u8; 2]) -> u16 {
    let offset = i16::from_le_bytes(offset);
    (((offset << 1) ^ (offset >> 15)) as u16).wrapping_add(1)
}

fn offset(number: u16) -> i16 {
    let zigzag = number.wrapping_sub(1);
    (zigzag >> 1) as i16 ^ -((zigzag & 1) as i16)
}

/// The bits of a number's code, first bit lowest, and how many there are: at most 24.
fn coded(number: u16, low: u32) -> (u64, u32) {
    let (top, number) = (number >> low, u64::from(number));
    match top < ESCAPE {
        true => {
            let (zeros, below) = (u32::from(top), number & ((1 << low) - 1));
            ((1 | below << 1) << zeros, zeros + 1 + low)
        }
        false => (number << ESCAPE, u32::from(ESCAPE) + 16),
    }
}

/// The number of low bits with which the offsets take the fewest bits in all, and that total.
fn fewest(offsets: &[[u8; 2]]) -> (u32, usize) {
    let bits = |low: u32| -> usize {
        let of = |offset: &[u8; 2]| match number(*offset) >> low {
            top if top < ESCAPE => usize::from(top) + 1 + low as usize,
            _ => usize::from(ESCAPE) + 16,
        };
        offsets.iter().map(of).sum()
    };
    (0..16).map(|low| (low, bits(low))).min_by_key(|(_, bits)| *bits).unwrap_or((0, 0))
}

/// Reads bits, the lowest of each byte first.
struct Bits<'a> {
    bytes: &'a [u8],
    word: u64,
    held: u32,
}

impl Bits<'_> {
    /// The next number; `None` if the bits end within it.
    fn number(&mut self, low: u32) -> Option<u16> {
        while self.held <= 56
            && let Some((byte, rest)) = self.bytes.split_first()
        {
            self.word |= u64::from(*byte) << self.held;
            (self.bytes, self.held) = (rest, self.held + 8);
        }
        let zeros = self.word.trailing_zeros();
        match zeros < u32::from(ESCAPE) {
            true => {
                self.take(zeros + 1)?;
                Some((zeros as u16) << low | self.take(low)? as u16)
            }
            false => {
                self.take(ESCAPE.into())?;
                Some(self.take(16)? as u16)
            }
        }
    }

    fn take(&mut self, n: u32) -> Option<u64> {
        self.held = self.held.checked_sub(n)?;
        let taken = self.word & ((1 << n) - 1);
        self.word >>= n;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rows: &[i16], cols: &[i16]) -> Vec<u8> {
        let mut out = vec![];
        out.extend((rows.len() as u32).to_le_bytes());
        out.extend((cols.len() as u32).to_le_bytes());
        out.extend([7; 16]);
        rows.iter().chain(cols).for_each(|offset| out.extend(offset.to_le_bytes()));
        out
    }

    #[test]
    fn the_example_of_the_specification() {
        let page = include_str!("../../../docs/predictors/offsets.md");
        let lines = page.lines().filter(|line| line.starts_with("    ") && line.contains(" | "));
        let bytes = lines.flat_map(|line| line.split('|').next().unwrap().split_whitespace());
        let packed: Vec<u8> = bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let mut offsets = of(&[-16, i16::MIN], &[0, 1, 2, -1, 0]);
        offsets[8..24].copy_from_slice(&packed[8..24]);
        assert_eq!(pack(&offsets).unwrap(), packed);
        assert_eq!(unpack(&packed).unwrap(), offsets);
    }

    #[test]
    fn every_offset_comes_back() {
        let all: Vec<i16> = (i16::MIN..=i16::MAX).collect();
        for low in 0..16 {
            for offset in &all {
                let (code, len) = coded(number(offset.to_le_bytes()), low);
                let bytes = code.to_le_bytes();
                let mut bits = Bits { bytes: &bytes[..len.div_ceil(8) as usize], word: 0, held: 0 };
                assert_eq!(bits.number(low).map(super::offset), Some(*offset), "{low}");
                assert_eq!((bits.word, bits.held < 8), (0, true));
            }
        }
    }

    #[test]
    fn packed_offsets_come_back_and_take_what_was_said() {
        let waves =
            |n: i16, by: i16| -> Vec<i16> { (0..n).map(|i| i * 37 % by - by / 2).collect() };
        let mut rows = waves(300, 1000);
        rows.extend([i16::MIN; 50]);
        rows.extend([i16::MAX, i16::MIN + 1]);
        for cols in [waves(200, 5), waves(100, 100), vec![0]] {
            let offsets = of(&rows, &cols);
            let packed = pack(&offsets).unwrap();
            assert_eq!(packed.len(), stored_len(&offsets));
            assert!(4 * packed.len() < 3 * offsets.len());
            assert_eq!(unpack(&packed).unwrap(), offsets);
        }
    }

    #[test]
    fn what_gains_nothing_or_is_none_stays() {
        let far: Vec<i16> = (0..500).map(|i: i16| i.wrapping_mul(17_321)).collect();
        let mut short = of(&[1; 40], &[1; 40]);
        short.pop();
        for offsets in [of(&far, &far), of(&[5], &[]), short, vec![9; 30], vec![]] {
            assert_eq!((pack(&offsets), stored_len(&offsets)), (None, offsets.len()));
        }
    }

    #[test]
    fn damage_is_refused() {
        let offsets = of(&[3, -700, 3, i16::MIN, 90], &[1; 60]);
        let packed = pack(&offsets).unwrap();
        for cut in 0..packed.len() {
            assert!(matches!(unpack(&packed[..cut]), Err(Error::Truncated { .. })), "{cut}");
        }
        let with = |at: usize, byte: u8| {
            let mut bad = packed.clone();
            bad[at] = byte;
            unpack(&bad)
        };
        assert!(matches!(unpack(&[&packed[..], &[0]].concat()), Err(Error::Corrupt { .. })));
        assert!(matches!(with(24, 16), Err(Error::Corrupt { .. })));
        assert!(matches!(with(25, 255), Err(Error::Corrupt { .. })));
        assert!(matches!(with(2, 200), Err(Error::Truncated { .. })));
        assert!(matches!(with(3, 200), Err(Error::Limit { .. })));
    }
}
