//! Encoding with several tables.

use std::arch::x86_64::*;

use s4_format::{Error, Result};

use super::super::part::Part;
use super::super::scalar::put_escapes;
use super::super::stream::{BLOCK, LANES, RUN, block_at};
use super::super::table::{MAX_TABLES, Table};
use super::encode::{Code, Codes, look_up, most_block, put_one, put_two};
use super::{VECTORS, WIDTH, load, store};

/// Symbols of all tables.
const ALL: usize = MAX_TABLES * 256;

/// The codes of the symbols of several tables: that of symbol `s` in table `t` is at index
/// `256 t + s`.
pub(crate) struct Encoder<const P: u32> {
    codes: Box<[Code; ALL]>,
    padding: u8,
}

/// The codes of a block: for each step, those of all lanes.
type Steps = [[Codes; VECTORS]; RUN];

impl<const P: u32> Encoder<P> {
    /// The encoder for tables of precision `P`; `None` if one has no symbols or a single one.
    pub(crate) fn new(tables: &[Table]) -> Option<Self> {
        let mut this = Self {
            codes: Box::new([Code::new::<P>(1, 0)?.marked(Code::LACKING); ALL]),
            padding: tables.first()?.padding(),
        };
        let rows = this.codes.as_chunks_mut::<256>().0.iter_mut();
        for (table, codes) in tables.iter().zip(rows) {
            let mark = if table.escape() > 0 { Code::ESCAPED } else { Code::LACKING };
            codes.fill(Code::new::<P>(table.escape().max(1), 0)?.marked(mark));
            for (entry, start) in table.slots() {
                codes[usize::from(entry.symbol)] = Code::new::<P>(entry.freq, start)?;
            }
        }
        Some(this)
    }

    /// Encodes one segment, whose contexts are below the number of tables.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is not in its table and there is no escape.
    ///
    /// # Safety
    /// - The machine has AVX2.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    pub(crate) unsafe fn segment(&self, part: &mut Part<'_>) -> Result<()> {
        let mut states = part.start;
        let mut at = part.words.len();
        let last = part.last_block(self.padding);
        let start = part.symbols.len() / BLOCK * BLOCK;
        let last_contexts = match part.contexts {
            [] => [0; BLOCK],
            contexts => block_at(contexts, start.min(contexts.len()), 0),
        };
        let (blocks, _) = part.symbols.as_chunks::<BLOCK>();
        let mut codes = [[Codes::ZERO; VECTORS]; RUN];
        let contexts = part.contexts.as_chunks::<BLOCK>().0;
        // SAFETY: as for this function.
        unsafe {
            if let Some(last) = last {
                let last = (&last, &last_contexts);
                self.block(&mut states, last, &mut codes, part.words, &mut at)?;
            }
            for (i, block) in blocks.iter().enumerate().rev() {
                let contexts = contexts.get(i).unwrap_or(&[0; BLOCK]);
                self.block(&mut states, (block, contexts), &mut codes, part.words, &mut at)?;
            }
        }
        part.len = part.words.len() - at;
        for (state, x) in part.states.as_chunks_mut::<4>().0.iter_mut().zip(states) {
            *state = x.to_le_bytes();
        }
        Ok(())
    }

    /// Encodes a block into the bytes before `at` in `words`. `codes` is scratch space.
    ///
    /// # Safety
    /// - The machine has AVX2.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn block(
        &self,
        states: &mut [u32; LANES],
        (block, contexts): (&[u8; BLOCK], &[u8; BLOCK]),
        codes: &mut Steps,
        words: &mut [u8],
        at: &mut usize,
    ) -> Result<()> {
        if *at < most_block(P) {
            return Err(Error::limit("rans: output buffer is too small for the words"));
        }
        if self.look_up(&numbers(block, contexts), codes) {
            put_escapes(states, block, &take_escapes(codes)?, words, at);
        }
        let mut next = words[..*at].as_mut_ptr_range().end;
        let mut x = load(states);
        // SAFETY: a renormalisation emits at most 16 bytes for each register, and always writes 16. There is room for
        // those of all that remain: escapes have taken at most their share.
        unsafe {
            if P == 8 {
                for [first, second] in codes.as_chunks().0.iter().rev() {
                    unrolled!(V in [3 2 1 0] { put_two(&mut x[V], &first[V], &second[V], &mut next) });
                }
            } else {
                for codes in codes.iter().rev() {
                    unrolled!(V in [3 2 1 0] { put_one(&mut x[V], &codes[V], &mut next) });
                }
            }
        }
        store(x, states);
        *at = next as usize - words.as_ptr() as usize;
        Ok(())
    }

    /// Looks up the codes at these indices; returns whether any of them is marked.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn look_up(&self, numbers: &[u16; BLOCK], codes: &mut Steps) -> bool {
        let mut marks = _mm256_setzero_si256();
        for (k, step) in codes.iter_mut().enumerate() {
            for (vector, codes) in step.iter_mut().enumerate() {
                let first = WIDTH * RUN * vector + k;
                let code = |lane: usize| {
                    let number = usize::from(numbers[first + RUN * lane]);
                    &raw const self.codes[number % ALL]
                };
                // SAFETY: each pointer is to a code.
                *codes = unsafe { look_up(code) };
                codes.add_marks(&mut marks);
            }
        }
        Codes::is_marked(marks)
    }
}

/// Removes the marks from the codes of a block. Returns, for each lane, a bit for each of its symbols
/// that is escaped.
///
/// # Errors
/// `Unsupported` if a symbol is not in its table and there is no escape.
#[target_feature(enable = "avx2")]
fn take_escapes(codes: &mut Steps) -> Result<[u8; LANES]> {
    let mut escaped = [0; LANES];
    let mut lacking = false;
    for (vector, lanes) in escaped.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
        let mut steps = [0; RUN];
        for (escaped, step) in steps.iter_mut().zip(&mut *codes) {
            *escaped = step[vector].take_escapes(&mut lacking);
        }
        *lanes = transposed(u64::from_le_bytes(steps)).to_le_bytes();
    }
    match lacking {
        false => Ok(escaped),
        true => Err(Error::unsupported("symbol is not in its table, which has no escape")),
    }
}

/// The transpose of a matrix of 8 by 8 bits: bit `i` of byte `k` becomes bit `k` of byte `i`. (Hacker's
/// Delight, 7-3.)
fn transposed(x: u64) -> u64 {
    let swap = |x: u64, mask: u64, by: u32| {
        let differ = (x ^ x >> by) & mask;
        x ^ differ ^ differ << by
    };
    let x = swap(x, 0x00aa_00aa_00aa_00aa, 7);
    let x = swap(x, 0x0000_cccc_0000_cccc, 14);
    swap(x, 0x0000_0000_f0f0_f0f0, 28)
}

/// The indices of the codes of a block's symbols.
#[inline]
#[target_feature(enable = "avx2")]
fn numbers(symbols: &[u8; BLOCK], contexts: &[u8; BLOCK]) -> [u16; BLOCK] {
    let mut numbers = [0; BLOCK];
    let (symbols, contexts) = (symbols.as_chunks::<32>().0, contexts.as_chunks::<32>().0);
    for (i, numbers) in numbers.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        // SAFETY: the first two pointers are to 32 readable bytes, the others to 32 writable ones.
        unsafe {
            let symbols = _mm256_loadu_si256(symbols[i].as_ptr().cast());
            let contexts = _mm256_loadu_si256(contexts[i].as_ptr().cast());
            // Interleaved within each half of the register.
            let low = _mm256_unpacklo_epi8(symbols, contexts);
            let high = _mm256_unpackhi_epi8(symbols, contexts);
            let to = numbers.as_mut_ptr().cast::<__m256i>();
            _mm256_storeu_si256(to, _mm256_permute2x128_si256::<0x20>(low, high));
            _mm256_storeu_si256(to.add(1), _mm256_permute2x128_si256::<0x31>(low, high));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_transposed() {
        for (i, k) in (0..8).flat_map(|i| (0..8).map(move |k| (i, k))) {
            assert_eq!(transposed(1 << (8 * k + i)), 1 << (8 * i + k));
        }
    }
}
