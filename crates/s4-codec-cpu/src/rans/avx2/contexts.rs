//! Encoding with several tables.

use std::arch::x86_64::*;

use s4_format::{Error, Result};

use super::super::part::Part;
use super::super::scalar::{block_at, put_escapes};
use super::super::stream::{BLOCK, LANES, RUN};
use super::super::table::{MAX_TABLES, Precision, Table};
use super::encode::{Code, MOST_BLOCK, emit, look_up};
use super::{VECTORS, WIDTH};

/// Symbols of all tables.
const ALL: usize = MAX_TABLES * 256;

/// A symbol that is escaped.
const ESCAPED: u8 = 1;
/// A symbol that neither is in its table nor can be escaped.
const LACKING: u8 = 2;

/// The codes of the symbols of several tables: of symbol `s` in table `t` that with number `256 t + s`.
pub(crate) struct Encoder {
    codes: Box<[Code; ALL]>,
    /// What its table lacks: [`ESCAPED`] or [`LACKING`] for each symbol, or 0.
    missing: Box<[u8; ALL]>,
    padding: u8,
}

impl Encoder {
    /// The encoder for tables of `P = 8`; `None` if one has no symbols.
    pub(crate) fn new(tables: &[Table]) -> Option<Self> {
        let first = tables.first().filter(|t| t.precision() == Precision::P8)?;
        let mut this = Self {
            codes: Box::new([Code::new(1, 0)?; ALL]),
            missing: Box::new([LACKING; ALL]),
            padding: first.padding(),
        };
        let rows = this.codes.as_chunks_mut::<256>().0.iter_mut();
        for ((table, codes), missing) in
            tables.iter().zip(rows).zip(this.missing.as_chunks_mut::<256>().0)
        {
            missing.fill(if table.escape() > 0 { ESCAPED } else { LACKING });
            codes.fill(Code::new(table.escape().max(1), 0)?);
            for (entry, start) in table.slots() {
                codes[usize::from(entry.symbol)] = Code::new(entry.freq, start)?;
                missing[usize::from(entry.symbol)] = 0;
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
        let contexts = part.contexts.as_chunks::<BLOCK>().0;
        // SAFETY: as for this function.
        unsafe {
            if let Some(last) = last {
                self.block(&mut states, &last, &last_contexts, part.words, &mut at)?;
            }
            for (i, block) in blocks.iter().enumerate().rev() {
                let contexts = contexts.get(i).unwrap_or(&[0; BLOCK]);
                self.block(&mut states, block, contexts, part.words, &mut at)?;
            }
        }
        part.len = part.words.len() - at;
        for (state, x) in part.states.as_chunks_mut::<4>().0.iter_mut().zip(states) {
            *state = x.to_le_bytes();
        }
        Ok(())
    }

    /// Encodes a block into what lies before `at` in `words`.
    ///
    /// # Safety
    /// - The machine has AVX2.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn block(
        &self,
        states: &mut [u32; LANES],
        block: &[u8; BLOCK],
        contexts: &[u8; BLOCK],
        words: &mut [u8],
        at: &mut usize,
    ) -> Result<()> {
        if *at < MOST_BLOCK {
            return Err(Error::limit("rans: no room for words"));
        }
        let numbers: [u16; BLOCK] =
            std::array::from_fn(|i| u16::from(contexts[i]) << 8 | u16::from(block[i]));
        let missing = |i: usize| self.missing[usize::from(numbers[i]) % ALL];
        let any = (0..BLOCK).fold(0, |any, i| any | missing(i));
        if any != 0 {
            if any & LACKING != 0 {
                return Err(Error::unsupported("a symbol that its table lacks, no escape"));
            }
            let marks = std::array::from_fn(|lane| {
                (0..RUN).fold(0, |marks, k| marks | missing(lane * RUN + k) << k)
            });
            put_escapes(states, block, &marks, words, at);
        }
        let mut next = words[..*at].as_mut_ptr_range().end;
        for pair in (0..RUN).step_by(2).rev() {
            for vector in (0..VECTORS).rev() {
                let states = &mut states[vector * WIDTH..][..WIDTH];
                let numbers = &numbers.as_chunks::<{ WIDTH * RUN }>().0[vector];
                let of = |k: usize| {
                    move |lane: usize| {
                        &raw const self.codes[usize::from(numbers[RUN * lane + k % RUN]) % ALL]
                    }
                };
                // SAFETY: each pointer is to a code; `states` are 32 bytes, to be read and written. A pair of steps
                // emits at most 16 bytes for each register, and overwrites as many before: all pairs together at
                // most half of MOST_BLOCK and 16 bytes.
                unsafe {
                    let (second, first) = (look_up(of(pair + 1)), look_up(of(pair)));
                    let mut x = _mm256_loadu_si256(states.as_ptr().cast());
                    emit(&mut x, _mm256_mullo_epi16(first.freq(), second.freq()), &mut next);
                    x = first.step(second.step(x));
                    _mm256_storeu_si256(states.as_mut_ptr().cast(), x);
                }
            }
        }
        *at = next as usize - words.as_ptr() as usize;
        Ok(())
    }
}
