//! Decoding.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use s4_format::{Error, Result};

use super::super::super::scalar::{check_end, decode_escapes};
use super::super::super::stream::{BLOCK, Carry, LANES, RUN, Segment};
use super::super::super::table::{Precision, Table};
use super::super::super::words::{Spare, Words};
use super::super::transpose::zip_dwords;
use super::{VECTORS, WIDTH, load, store};

/// Slots of a table.
const SLOTS: usize = 1 << 12;
/// Bytes that the steps of one block may read: a word of each lane for each symbol.
const BLOCK_AHEAD: usize = 2 * LANES * RUN;

/// What each slot stands for.
pub(in crate::rans) struct Decoder {
    /// Frequency less one (12 bits), place among the symbol's slots (12 bits), symbol (8 bits).
    slots: Box<[u32; SLOTS]>,
    /// The symbol that stands for the escape, if there is one.
    escape: Option<u8>,
}

/// A segment being decoded, at a block boundary.
struct Lane<'a> {
    states: [u32; LANES],
    words: Words,
    /// What is left of the symbols.
    symbols: &'a mut [u8],
}

impl<'a> Lane<'a> {
    fn new(segment: &Segment<'_>, symbols: &'a mut [u8], spare: &mut Spare) -> Result<Self> {
        Ok(Self { states: segment.states()?, words: Words::new(segment, spare), symbols })
    }

    /// Whole blocks that are left.
    fn blocks(&self) -> usize {
        self.symbols.len() / BLOCK
    }

    #[inline]
    fn next_block(&mut self) -> Result<&'a mut [u8; BLOCK]> {
        let symbols = std::mem::take(&mut self.symbols);
        let (block, rest) = symbols.split_first_chunk_mut().ok_or_else(no_block)?;
        self.symbols = rest;
        Ok(block)
    }
}

#[cold]
fn no_block() -> Error {
    Error::limit("rans: no room for a block")
}

impl Decoder {
    /// The decoder for a table of `P = 12`; `None` for one of another precision, or if there are
    /// escapes, but no byte that is not a symbol and could stand for them.
    pub(in crate::rans) fn new(table: &Table) -> Option<Self> {
        if table.precision() != Precision::P12 {
            return None;
        }
        let mut seen = [false; 256];
        table.entries().iter().for_each(|entry| seen[usize::from(entry.symbol)] = true);
        let mut escape = None;
        if table.escape() > 0 {
            escape = Some(seen.iter().position(|seen| !seen)? as u8);
        }
        let mut slots = Vec::with_capacity(SLOTS);
        let mut fill = |freq: u16, symbol: u8| {
            let slot = u32::from(freq).wrapping_sub(1) | u32::from(symbol) << 24;
            slots.extend((0..u32::from(freq)).map(|bias| slot | bias << 12));
        };
        fill(table.escape(), escape.unwrap_or(0));
        table.entries().iter().for_each(|entry| fill(entry.freq, entry.symbol));
        // A table's frequencies add up to 2^12.
        Some(Self { slots: slots.into_boxed_slice().try_into().ok()?, escape })
    }

    /// Decodes segments into the ranges of `symbols` that they are given with, which follow each
    /// other, two at a time. What each carries is appended to `carries`.
    ///
    /// # Errors
    /// `Corrupt` if a state or the number of words is wrong.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    pub(in crate::rans) unsafe fn segments<'a>(
        &self,
        segments: impl Iterator<Item = (Range<usize>, Segment<'a>)>,
        mut symbols: &mut [u8],
        carries: &mut Vec<Carry>,
    ) -> Result<()> {
        let mut jobs = segments.map(|(range, segment)| {
            let (own, rest) = std::mem::take(&mut symbols).split_at_mut(range.len());
            symbols = rest;
            (segment, own)
        });
        while let Some((segment, own)) = jobs.next() {
            let mut spares = [const { Spare::NEW }; 2];
            let [spare, other_spare] = &mut spares;
            let mut lane = Lane::new(&segment, own, spare)?;
            let mut other = match jobs.next() {
                Some((segment, own)) => Some(Lane::new(&segment, own, other_spare)?),
                None => None,
            };
            // SAFETY: the segments and the spares are there; the machine is as demanded.
            unsafe {
                if let Some(other) = &mut other {
                    let both = lane.blocks().min(other.blocks());
                    self.blocks([&mut lane, other], both)?;
                }
                for mut lane in std::iter::once(lane).chain(other) {
                    let left = lane.blocks();
                    self.blocks([&mut lane], left)?;
                    self.last_block(&mut lane)?;
                    carries.push(check_end(&lane.states, lane.words.left())?);
                }
            }
        }
        Ok(())
    }

    /// Decodes what is left of a segment, less than a block.
    ///
    /// # Safety
    /// - As for [`Decoder::blocks`].
    unsafe fn last_block(&self, lane: &mut Lane<'_>) -> Result<()> {
        let rest = std::mem::take(&mut lane.symbols);
        if rest.is_empty() {
            return Ok(());
        }
        let mut symbols = [0; BLOCK];
        let mut last = Lane { symbols: &mut symbols, ..*lane };
        // SAFETY: as for this function.
        unsafe { self.blocks([&mut last], 1)? };
        (lane.states, lane.words) = (last.states, last.words);
        rest.copy_from_slice(&symbols[..rest.len()]);
        Ok(())
    }

    /// Decodes `blocks` blocks of each lane.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    /// - The segment and the spare of each lane are there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks<const N: usize>(
        &self,
        mut lanes: [&mut Lane<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        let mut x: [_; N] = from_fn(|n| load(&lanes[n].states));
        for _ in 0..blocks {
            for lane in &mut lanes {
                // SAFETY: as for this function; `check` follows every use of words.
                unsafe { lane.words.ensure(BLOCK_AHEAD) };
            }
            let mut next: [_; N] = from_fn(|n| lanes[n].words.next);
            let mut halves = [[[_mm512_setzero_si512(); VECTORS]; 2]; N];
            for k in 0..RUN {
                for n in 0..N {
                    for v in 0..VECTORS {
                        self.step(&mut x[n][v], &mut halves[n][k / 4][v]);
                    }
                    for x in &mut x[n] {
                        // SAFETY: one of the loads that were ensured.
                        unsafe { refill(x, &mut next[n]) };
                    }
                }
            }
            for n in 0..N {
                let lane = &mut *lanes[n];
                lane.words.next = next[n];
                lane.words.check()?;
                let block = lane.next_block()?;
                let escapes = store_symbols(&halves[n], block, self.escape.unwrap_or(0));
                if self.escape.is_some() && escapes != [0; 4] {
                    store(x[n], &mut lane.states);
                    // SAFETY: as for this function, and `check` has succeeded.
                    unsafe { lane.take_escapes(escapes, block)? };
                    x[n] = load(&lane.states);
                }
            }
        }
        for (lane, x) in lanes.iter_mut().zip(x) {
            store(x, &mut lane.states);
        }
        Ok(())
    }

    /// One step of 16 lanes. The new symbols enter `symbols` from above.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn step(&self, x: &mut __m512i, symbols: &mut __m512i) {
        let fields = _mm512_set1_epi32(0xfff);
        let index = _mm512_and_si512(*x, fields);
        // SAFETY: every index is below the number of slots.
        let slots = unsafe { _mm512_i32gather_epi32::<4>(index, self.slots.as_ptr().cast()) };
        let less = _mm512_and_si512(slots, fields);
        let bias = _mm512_and_si512(_mm512_srli_epi32::<12>(slots), fields);
        let whole = _mm512_srli_epi32::<12>(*x);
        let x1 = _mm512_add_epi32(_mm512_mullo_epi32(whole, less), bias);
        *x = _mm512_add_epi32(x1, whole);
        let symbol = _mm512_andnot_si512(_mm512_set1_epi32(0x00ff_ffff), slots);
        *symbols = _mm512_or_si512(_mm512_srli_epi32::<8>(*symbols), symbol);
    }
}

impl Lane<'_> {
    /// Puts the symbols that follow a block in the places of its escapes.
    ///
    /// # Safety
    /// - As for [`Words::as_slice`].
    #[cold]
    unsafe fn take_escapes(&mut self, escapes: [u64; 4], block: &mut [u8; BLOCK]) -> Result<()> {
        let mut lanes = [0; LANES];
        for (lanes, row) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(escapes) {
            *lanes = row.to_le_bytes();
        }
        let states = &mut self.states;
        // SAFETY: as for this function.
        unsafe { self.words.as_slice(|rest| decode_escapes(states, rest, lanes, block)) }
    }
}

/// Gives a word to every lane below 2^16.
///
/// # Safety
/// - The 32 bytes at `next` may be read.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn refill(x: &mut __m512i, next: &mut *const u8) {
    let needs = _mm512_cmplt_epu32_mask(*x, _mm512_set1_epi32(1 << 16));
    // SAFETY: as for this function; at most 16 words are taken.
    let words = unsafe {
        let words = _mm256_loadu_si256(next.cast());
        *next = next.add(2 * needs.count_ones() as usize);
        words
    };
    let words = _mm512_maskz_expand_epi32(needs, _mm512_cvtepu16_epi32(words));
    *x = _mm512_mask_or_epi32(*x, needs, _mm512_slli_epi32::<16>(*x), words);
}

/// Writes the symbols of a block; returns a bit for each that is `escape`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_symbols(
    halves: &[[__m512i; VECTORS]; 2],
    block: &mut [u8; BLOCK],
    escape: u8,
) -> [u64; 4] {
    const { assert!(BLOCK == VECTORS * 2 * 64 && WIDTH * RUN == 128) };
    let marker = _mm512_set1_epi8(escape as i8);
    let mut escapes = [0; 4];
    let (rows, _) = block.as_chunks_mut::<64>();
    for (i, row) in rows.iter_mut().enumerate() {
        // Each lane's first four symbols and its other four, 8 lanes in a row.
        let symbols = zip_dwords(halves[0][i / 2], halves[1][i / 2], i % 2);
        // SAFETY: the row has 64 bytes.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), symbols) };
        escapes[i] = _mm512_cmpeq_epi8_mask(symbols, marker);
    }
    escapes
}
