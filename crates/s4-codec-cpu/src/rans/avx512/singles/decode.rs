//! Decoding.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::Result;

use super::super::super::pairs::{Blocks, Escapes, SegmentDecoder, Slots};
use super::super::super::stream::{BLOCK, LANES, RUN};
use super::super::super::table::MAX_TABLES;
use super::super::transpose;
use super::{VECTORS, WIDTH, load, store};

/// Bytes that the steps of one block may read: a word of each lane for each symbol.
const BLOCK_AHEAD: usize = 2 * LANES * RUN;

/// A decoder for tables of precision `P`, in memory.
pub(in crate::rans) struct Decoder<const P: u32>(Slots);

impl<const P: u32> Blocks for Decoder<P> {
    fn new(slots: Slots) -> Self {
        Self(slots)
    }

    unsafe fn blocks<const N: usize>(
        &self,
        segments: [&mut SegmentDecoder<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        // SAFETY: as for this function.
        unsafe {
            match segments.iter().any(|segment| !segment.contexts.is_empty()) {
                true => self.blocks_of::<N, true>(segments, blocks),
                false => self.blocks_of::<N, false>(segments, blocks),
            }
        }
    }
}

impl<const P: u32> Decoder<P> {
    /// Decodes `blocks` blocks of each segment, with contexts if CONTEXTS is set.
    ///
    /// # Safety
    /// - As for [`Blocks::blocks`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks_of<const N: usize, const CONTEXTS: bool>(
        &self,
        mut segments: [&mut SegmentDecoder<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        let mut x: [_; N] = from_fn(|n| load(&segments[n].states));
        let mut runs = [[[_mm512_setzero_si512(); VECTORS]; 2]; N];
        for _ in 0..blocks {
            let mut contexts = [&[0; BLOCK]; N];
            for ((segment, runs), contexts) in segments.iter_mut().zip(&mut runs).zip(&mut contexts)
            {
                if CONTEXTS {
                    *contexts = segment.next_contexts()?;
                    *runs = unzipped(contexts);
                }
                // SAFETY: as for this function; `check` follows every use of words.
                unsafe { segment.words.ensure(BLOCK_AHEAD) };
            }
            let mut next: [_; N] = from_fn(|n| segments[n].words.next);
            let mut halves = [[[_mm512_setzero_si512(); VECTORS]; 2]; N];
            for k in 0..RUN {
                for n in 0..N {
                    for v in 0..VECTORS {
                        let shifted = _mm512_set1_epi32(8 * (k as i32 % 4));
                        let contexts = _mm512_srlv_epi32(runs[n][k / 4][v], shifted);
                        let symbols = &mut halves[n][k / 4][v];
                        // SAFETY: contexts are as for this function.
                        unsafe { self.step::<CONTEXTS>(&mut x[n][v], contexts, symbols) };
                    }
                    if P != 8 || k % 2 == 1 {
                        for x in &mut x[n] {
                            // SAFETY: one of the loads that were ensured.
                            unsafe { refill(x, &mut next[n]) };
                        }
                    }
                }
            }
            for n in 0..N {
                let segment = &mut *segments[n];
                segment.words.next = next[n];
                segment.words.check()?;
                let block = segment.next_block()?;
                store_symbols(&halves[n], block);
                let Some(escapes) = &self.0.escapes else { continue };
                let escapes = escaped(block, contexts[n], escapes);
                if escapes != [0; 4] {
                    store(x[n], &mut segment.states);
                    // SAFETY: as for this function, and `check` has succeeded.
                    unsafe { segment.take_escapes(escapes, block)? };
                    x[n] = load(&segment.states);
                }
            }
        }
        for (segment, x) in segments.iter_mut().zip(x) {
            store(x, &mut segment.states);
        }
        Ok(())
    }

    /// One step of 16 lanes; the low bytes of `contexts` are the indices of their tables. The new
    /// symbols are shifted into `symbols` from the top.
    ///
    /// # Safety
    /// - The contexts are below the number of tables, or CONTEXTS is not set.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step<const CONTEXTS: bool>(
        &self,
        x: &mut __m512i,
        contexts: __m512i,
        symbols: &mut __m512i,
    ) {
        let mut index = _mm512_and_si512(*x, _mm512_set1_epi32((1 << P) - 1));
        if CONTEXTS {
            let table = _mm512_and_si512(contexts, _mm512_set1_epi32(0xff));
            index = _mm512_add_epi32(index, _mm512_sll_epi32(table, _mm_cvtsi32_si128(P as i32)));
        }
        // SAFETY: every index is below the number of slots.
        let slots = unsafe { _mm512_i32gather_epi32::<4>(index, self.0.all.as_ptr().cast()) };
        let fields = _mm512_set1_epi32(0xfff);
        let freq = _mm512_and_si512(slots, fields);
        let bias = _mm512_and_si512(_mm512_srli_epi32::<12>(slots), fields);
        let whole = match P {
            12 => _mm512_srli_epi32::<12>(*x),
            _ => _mm512_srli_epi32::<8>(*x),
        };
        *x = _mm512_add_epi32(_mm512_mullo_epi32(whole, freq), bias);
        if P == 12 {
            // Slots of `P = 12` hold frequencies minus one.
            *x = _mm512_add_epi32(*x, whole);
        }
        let symbol = _mm512_andnot_si512(_mm512_set1_epi32(0x00ff_ffff), slots);
        *symbols = _mm512_or_si512(_mm512_srli_epi32::<8>(*symbols), symbol);
    }
}

/// The contexts of a block: the first four of each lane, and the other four.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unzipped(contexts: &[u8; BLOCK]) -> [[__m512i; VECTORS]; 2] {
    let (rows, _) = contexts.as_chunks::<64>();
    let mut halves = [[_mm512_setzero_si512(); VECTORS]; 2];
    for v in 0..VECTORS {
        let (a, b) = (transpose::load(&rows[2 * v]), transpose::load(&rows[2 * v + 1]));
        [halves[0][v], halves[1][v]] = transpose::unzip_dwords(a, b);
    }
    halves
}

/// Gives a word to every lane whose state is below 2^16.
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

/// Writes the symbols of a block.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_symbols(halves: &[[__m512i; VECTORS]; 2], block: &mut [u8; BLOCK]) {
    const { assert!(BLOCK == VECTORS * 2 * 64 && WIDTH * RUN == 128) };
    let (rows, _) = block.as_chunks_mut::<64>();
    for (i, row) in rows.iter_mut().enumerate() {
        // Each lane's first four symbols and its other four, 8 lanes in a row.
        let symbols = transpose::zip_dwords(halves[0][i / 2], halves[1][i / 2], i % 2);
        // SAFETY: the row has 64 bytes.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), symbols) };
    }
}

/// A bit for each symbol of a block that marks an escape.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn escaped(block: &[u8; BLOCK], contexts: &[u8; BLOCK], escapes: &Escapes) -> [u64; 4] {
    const { assert!(MAX_TABLES == 16) };
    // SAFETY: the pointer is to 16 readable bytes.
    let table = |bytes: &[u8; 16]| unsafe {
        _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast()))
    };
    let (markers, present) = (table(&escapes.markers), table(&escapes.present));
    let (symbols, contexts) = (block.as_chunks::<64>().0, contexts.as_chunks::<64>().0);
    let mut found = [0; 4];
    for i in 0..BLOCK / 64 {
        let contexts = transpose::load(&contexts[i]);
        let markers = _mm512_shuffle_epi8(markers, contexts);
        let present = _mm512_movepi8_mask(_mm512_shuffle_epi8(present, contexts));
        found[i] = _mm512_mask_cmpeq_epi8_mask(present, transpose::load(&symbols[i]), markers);
    }
    found
}
