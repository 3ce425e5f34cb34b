//! Encoding.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::{Error, Result};

use super::super::super::digits::reciprocal32;
use super::super::super::part::Part;
use super::super::super::scalar::put_escapes;
use super::super::super::stream::{BLOCK, LANES, RUN};
use super::super::super::table::{Precision, Table};
use super::super::transpose;
use super::{VECTORS, WIDTH, load, store};

/// The most bytes of words that a block emits: one word for each symbol, and one for every second
/// escape.
const MOST_BLOCK: usize = 2 * LANES * (RUN + RUN / 2);

/// Codes that are looked up in registers, including that of the escape.
const CODES: usize = 64;

/// The encoder's look-up tables.
pub(in crate::rans) struct Encoder {
    /// The code of each symbol: 0 if the table lacks it, otherwise its position in the table,
    /// counted from 1, or from 0 if the table lacks none.
    code: [u8; 256],
    /// For each code, 4096 minus the frequency (12 bits), the first slot (12 bits), the shift of
    /// the reciprocal. Code 0 is that of the escape if the table lacks symbols.
    slots: [u32; 256],
    /// For each code, the reciprocal of the frequency.
    multiplier: [u32; 256],
    /// Whether registers hold all codes.
    few: bool,
    /// Whether the table has every symbol.
    complete: bool,
    escapes: bool,
    padding: u8,
}

/// A segment being encoded, at a block boundary.
struct SegmentEncoder<'a, 'b> {
    part: &'a mut Part<'b>,
    states: [u32; LANES],
    /// Blocks that are not encoded yet: the first ones of the segment.
    blocks: usize,
    /// Start of the words written so far.
    at: usize,
}

impl Encoder {
    /// The encoder for a table of `P = 12`; `None` for one of another precision.
    pub(in crate::rans) fn new(table: &Table) -> Option<Self> {
        if table.precision() != Precision::P12 {
            return None;
        }
        // A table of all symbols has no escape, and needs no code for one.
        let entries = table.entries().len();
        let complete = entries == 256;
        let mut this = Self {
            code: [0; 256],
            slots: [0; 256],
            multiplier: [0; 256],
            few: entries < CODES,
            complete,
            escapes: table.escape() > 0,
            padding: table.padding(),
        };
        this.set(0, table.escape().max(1), 0);
        for (i, (entry, start)) in table.slots().enumerate() {
            let code = i + usize::from(!complete);
            this.code[usize::from(entry.symbol)] = code as u8;
            this.set(code, entry.freq, start);
        }
        Some(this)
    }

    fn set(&mut self, code: usize, freq: u16, start: u16) {
        let (multiplier, shift) = reciprocal32(freq);
        let less = (1 << 12) - u32::from(freq);
        self.slots[code] = less | u32::from(start) << 12 | u32::from(shift) << 24;
        self.multiplier[code] = multiplier;
    }

    /// Encodes segments, two side by side.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is not in the table and there is no escape.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    pub(in crate::rans) unsafe fn group(&self, parts: &mut [Part<'_>]) -> Result<()> {
        for two in parts.chunks_mut(2) {
            let mut segments = Vec::with_capacity(2);
            for part in two {
                let (states, at) = (part.start, part.words.len());
                let blocks = part.symbols.len() / BLOCK;
                let last = part.last_block(self.padding);
                let mut segment = SegmentEncoder { part, states, blocks, at };
                if let Some(block) = last {
                    // SAFETY: as for this function.
                    unsafe { self.blocks([&mut segment], [&block])? };
                }
                segments.push(segment);
            }
            // SAFETY: as for this function.
            unsafe {
                if let [segment, other] = &mut segments[..] {
                    let both = segment.blocks.min(other.blocks);
                    let sources = [segment.take_blocks(both), other.take_blocks(both)];
                    self.blocks([segment, other], sources)?;
                }
                for segment in &mut segments {
                    let source = segment.take_blocks(segment.blocks);
                    self.blocks([segment], [source])?;
                }
            }
            segments.into_iter().for_each(SegmentEncoder::finish);
        }
        Ok(())
    }

    /// Encodes whole blocks of `N` segments, equally many of each, the last one first.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    unsafe fn blocks<const N: usize>(
        &self,
        segments: [&mut SegmentEncoder<'_, '_>; N],
        sources: [&[u8]; N],
    ) -> Result<()> {
        // SAFETY: as for this function.
        unsafe {
            match self.few {
                true => self.blocks_of::<N, true>(segments, sources),
                false => self.blocks_of::<N, false>(segments, sources),
            }
        }
    }

    /// As [`Encoder::blocks`]; FEW says whether codes are looked up in registers.
    ///
    /// # Safety
    /// - As for [`Encoder::blocks`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks_of<const N: usize, const FEW: bool>(
        &self,
        mut segments: [&mut SegmentEncoder<'_, '_>; N],
        sources: [&[u8]; N],
    ) -> Result<()> {
        let tables = Tables::load(self);
        let sources = sources.map(|source| source.as_chunks::<BLOCK>().0);
        let mut x: [_; N] = from_fn(|n| load(&segments[n].states));
        for block in (0..sources[0].len()).rev() {
            let mut next = [std::ptr::null_mut(); N];
            let mut runs = [[[_mm512_setzero_si512(); VECTORS]; 2]; N];
            for n in 0..N {
                let segment = &mut *segments[n];
                let symbols = &sources[n][block];
                if segment.at < MOST_BLOCK {
                    return Err(no_room());
                }
                let (rows, _) = symbols.as_chunks::<64>();
                let mut codes = [_mm512_setzero_si512(); 4];
                let mut unknown = [0; 4];
                for i in 0..4 {
                    codes[i] = tables.codes(transpose::load(&rows[i]));
                    unknown[i] = _mm512_testn_epi8_mask(codes[i], codes[i]);
                }
                if !self.complete && unknown != [0; 4] {
                    store(x[n], &mut segment.states);
                    self.put_escapes(segment, symbols, unknown)?;
                    x[n] = load(&segment.states);
                }
                // SAFETY: `at` is a place in the words.
                next[n] = unsafe { segment.part.words.as_mut_ptr().add(segment.at) };
                for v in 0..VECTORS {
                    let [first, second] = transpose::unzip_dwords(codes[2 * v], codes[2 * v + 1]);
                    runs[n][0][v] = first;
                    runs[n][1][v] = second;
                }
            }
            for k in (0..RUN).rev() {
                for n in 0..N {
                    for v in (0..VECTORS).rev() {
                        let run = runs[n][k / 4][v];
                        let shifted = _mm512_srlv_epi32(run, _mm512_set1_epi32(8 * (k as i32 % 4)));
                        let (slots, multiplier) = match FEW {
                            true => tables.look_up(shifted),
                            false => self.gather(shifted),
                        };
                        // SAFETY: the words of a block fit, as was checked.
                        unsafe { step(&mut x[n][v], slots, multiplier, &mut next[n]) };
                    }
                }
            }
            for (segment, next) in segments.iter_mut().zip(next) {
                segment.at = next as usize - segment.part.words.as_ptr() as usize;
            }
        }
        for (segment, x) in segments.iter_mut().zip(x) {
            store(x, &mut segment.states);
        }
        Ok(())
    }

    /// Looks up the codes in the low bytes of the double words of `codes`: slots and multipliers.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn gather(&self, codes: __m512i) -> (__m512i, __m512i) {
        let index = _mm512_and_si512(codes, _mm512_set1_epi32(0xff));
        // SAFETY: indices are below 256.
        unsafe {
            (
                _mm512_i32gather_epi32::<4>(index, self.slots.as_ptr().cast()),
                _mm512_i32gather_epi32::<4>(index, self.multiplier.as_ptr().cast()),
            )
        }
    }

    /// Codes the escapes of a block.
    #[cold]
    fn put_escapes(
        &self,
        segment: &mut SegmentEncoder<'_, '_>,
        symbols: &[u8; BLOCK],
        unknown: [u64; 4],
    ) -> Result<()> {
        if !self.escapes {
            return Err(Error::unsupported("symbol is not in its table, which has no escape"));
        }
        let mut marks = [0; LANES];
        for (marks, row) in marks.as_chunks_mut::<8>().0.iter_mut().zip(unknown) {
            *marks = row.to_le_bytes();
        }
        put_escapes(&mut segment.states, symbols, &marks, segment.part.words, &mut segment.at);
        Ok(())
    }
}

/// The tables of an [`Encoder`] in registers, for up to [`CODES`] codes.
struct Tables {
    code: [__m512i; 4],
    slots: [__m512i; 4],
    multiplier: [__m512i; 4],
}

impl Tables {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(encoder: &Encoder) -> Self {
        let (code, _) = encoder.code.as_chunks::<64>();
        let (slots, _) = encoder.slots.as_chunks::<WIDTH>();
        let (multiplier, _) = encoder.multiplier.as_chunks::<WIDTH>();
        Self {
            code: from_fn(|i| transpose::load(&code[i])),
            slots: from_fn(|i| transpose::load(&slots[i])),
            multiplier: from_fn(|i| transpose::load(&multiplier[i])),
        }
    }

    /// The codes of symbols.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn codes(&self, symbols: __m512i) -> __m512i {
        let a = _mm512_permutex2var_epi8(self.code[0], symbols, self.code[1]);
        let b = _mm512_permutex2var_epi8(self.code[2], symbols, self.code[3]);
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(symbols), a, b)
    }

    /// As [`Encoder::gather`], for codes below [`CODES`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn look_up(&self, codes: __m512i) -> (__m512i, __m512i) {
        let upper = _mm512_test_epi32_mask(codes, _mm512_set1_epi32(32));
        let of = |table: &[__m512i; 4]| {
            let a = _mm512_permutex2var_epi32(table[0], codes, table[1]);
            let b = _mm512_permutex2var_epi32(table[2], codes, table[3]);
            _mm512_mask_blend_epi32(upper, a, b)
        };
        (of(&self.slots), of(&self.multiplier))
    }
}

/// Codes a step of 16 lanes.
///
/// # Safety
/// - The 32 bytes before `next` may be written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt,bmi2")]
unsafe fn step(x: &mut __m512i, slots: __m512i, multiplier: __m512i, next: &mut *mut u8) {
    let fields = _mm512_set1_epi32(0xfff);
    let less = _mm512_and_si512(slots, fields);
    let freq = _mm512_sub_epi32(_mm512_set1_epi32(1 << 12), less);
    // x >= freq * 2^20, which for the frequency 2^12 is beyond every state.
    let full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32::<20>(*x), freq);
    let words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, *x));
    let count = full.count_ones();
    // SAFETY: as for this function; `count <= 16` words are written.
    unsafe {
        *next = next.sub(2 * count as usize);
        _mm256_mask_storeu_epi16(next.cast(), _bzhi_u32(!0, count) as u16, words);
    }
    let y = _mm512_mask_srli_epi32::<16>(*x, full, *x);
    // (y + y * multiplier / 2^32) >> shift = y / freq: see `digits`.
    let even = _mm512_srli_epi64::<32>(_mm512_mul_epu32(y, multiplier));
    let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(y), _mm512_srli_epi64::<32>(multiplier));
    let product = _mm512_mask_blend_epi32(0xaaaa, even, odd);
    let shift = _mm512_srli_epi32::<24>(slots);
    let quotient = _mm512_srlv_epi32(_mm512_add_epi32(y, product), shift);
    let start = _mm512_and_si512(_mm512_srli_epi32::<12>(slots), fields);
    let moved = _mm512_mullo_epi32(quotient, less);
    *x = _mm512_add_epi32(_mm512_add_epi32(y, start), moved);
}

#[cold]
fn no_room() -> Error {
    Error::limit("rans: output buffer is too small for the words")
}

impl<'b> SegmentEncoder<'_, 'b> {
    /// Takes the last `count` of the blocks that are left.
    fn take_blocks(&mut self, count: usize) -> &'b [u8] {
        const { assert!(WIDTH * VECTORS == LANES) };
        let end = self.blocks * BLOCK;
        self.blocks -= count;
        &self.part.symbols[self.blocks * BLOCK..end]
    }

    /// Stores the states and the length in the part.
    fn finish(self) {
        for (to, state) in self.part.states.as_chunks_mut::<4>().0.iter_mut().zip(self.states) {
            *to = state.to_le_bytes();
        }
        self.part.len = self.part.words.len() - self.at;
    }
}
