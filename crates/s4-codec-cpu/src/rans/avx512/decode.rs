//! Decoding.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use s4_format::Result;

use super::super::scalar::check_end;
use super::super::stream::{BLOCK, Carry, LANES, RUN, Segment};
use super::super::table::Table;
use super::super::words::{Spare, Words};
use super::transpose::{load, to_symbols};

/// Odd bytes of a register: the high halves of its words.
const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;
/// Bytes that the steps of one block may read: a register for each refill.
const BLOCK_AHEAD: usize = 64 * RUN / 2;

/// The meaning of each slot, in tables for look-up by permutations.
#[repr(align(64))]
pub(crate) struct Decoder {
    /// Frequency of the symbol that owns the slot.
    freq: [u8; 256],
    /// The smallest `c` with `freq * c / 256 == slot - start`. With the slot, the low byte of the
    /// state, replaced by it, one multiplication gives `freq * (x >> 8) + slot - start`.
    carry: [u8; 256],
    /// The symbol; for slots of the escape, one that is not in the table.
    symbol: [u8; 256],
    /// The symbol that marks the escape, if there is one.
    escape: Option<u8>,
}

/// A segment being decoded, at a block boundary.
#[derive(Clone, Copy)]
struct SegmentDecoder {
    low: [u16; LANES],
    high: [u16; LANES],
    words: Words,
    /// The destination of the next block.
    out: *mut u8,
    /// Blocks still to be decoded.
    blocks: usize,
}

impl SegmentDecoder {
    /// A decoder that decodes the same segment once more, into `sink`.
    fn discarding_copy(self, spare: *mut Spare, sink: &mut [u8; BLOCK]) -> Self {
        Self { words: self.words.with_spare(spare), out: sink.as_mut_ptr(), ..self }
    }
}

impl Decoder {
    /// The decoder for a table of `P = 8`; `None` if it has no symbols (and so a frequency of 256).
    pub(crate) fn new(table: &Table) -> Option<Self> {
        let mut seen = [false; 256];
        let mut this = Self { freq: [0; 256], carry: [0; 256], symbol: [0; 256], escape: None };
        for (entry, start) in table.slots() {
            seen[usize::from(entry.symbol)] = true;
            this.fill(start.into(), entry.freq.try_into().ok()?, entry.symbol);
        }
        if table.escape() > 0 {
            let escape = seen.iter().position(|seen| !seen)? as u8;
            this.fill(0, table.escape().try_into().ok()?, escape);
            this.escape = Some(escape);
        }
        Some(this)
    }

    /// Assigns `freq` slots from `start` on to a symbol.
    fn fill(&mut self, start: usize, freq: u8, symbol: u8) {
        let slots = start..start + usize::from(freq);
        self.freq[slots.clone()].fill(freq);
        self.symbol[slots.clone()].fill(symbol);
        // ceil(256 * bias / freq), by a reciprocal that is exact for dividends below 2^16.
        let freq = u64::from(freq);
        let reciprocal = (1u64 << 24).div_ceil(freq);
        for (bias, carry) in (0..freq).zip(&mut self.carry[slots]) {
            *carry = (((256 * bias + freq - 1) * reciprocal) >> 24) as u8;
        }
    }

    /// Decodes segments into the ranges of `symbols` that come with them.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    pub(crate) unsafe fn segments<'a>(
        &self,
        mut segments: impl Iterator<Item = (Range<usize>, Segment<'a>)>,
        symbols: &mut [u8],
        carries: &mut Vec<Carry>,
    ) -> Result<()> {
        loop {
            let group: [_; 4] = from_fn(|_| segments.next());
            // SAFETY: as for this function.
            unsafe {
                match group.iter().flatten().count() {
                    0 => return Ok(()),
                    1 | 2 => self.group::<2>(&group, symbols, carries)?,
                    _ => self.group::<4>(&group, symbols, carries)?,
                }
            }
        }
    }

    /// Decodes at most `N` segments, side by side.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    unsafe fn group<const N: usize>(
        &self,
        group: &[Option<(Range<usize>, Segment<'_>)>],
        symbols: &mut [u8],
        carries: &mut Vec<Carry>,
    ) -> Result<()> {
        let mut spares = [const { Spare::NEW }; N];
        let mut last_blocks = [[0; BLOCK]; N];
        let mut segments = Vec::with_capacity(N);
        for ((range, segment), spare) in group.iter().flatten().zip(&mut spares) {
            let states = segment.states()?;
            let out = &mut symbols[range.clone()];
            segments.push(SegmentDecoder {
                low: states.map(|x| x as u16),
                high: states.map(|x| (x >> 16) as u16),
                words: Words::new(segment, spare),
                out: out.as_mut_ptr(),
                blocks: out.len() / BLOCK,
            });
        }
        // SAFETY: each segment has its own words, spare and part of `symbols`, of at least as many
        // blocks as it says; the machine is as for this function.
        unsafe { self.advance::<N>(&mut segments)? };
        let ranges = || group.iter().flatten().map(|(range, _)| range.clone());
        for ((segment, range), block) in segments.iter_mut().zip(ranges()).zip(&mut last_blocks) {
            segment.out = block.as_mut_ptr();
            segment.blocks = usize::from(range.len() % BLOCK != 0);
        }
        // SAFETY: as above, with a block of its own for each segment.
        unsafe { self.advance::<N>(&mut segments)? };
        for ((segment, range), block) in segments.iter().zip(ranges()).zip(&last_blocks) {
            let rest = range.len() % BLOCK;
            symbols[range.end - rest..range.end].copy_from_slice(&block[..rest]);
            let state = |l: usize| u32::from(segment.high[l]) << 16 | u32::from(segment.low[l]);
            carries.push(check_end(&from_fn(state), segment.words.left())?);
        }
        Ok(())
    }

    /// Decodes the blocks of all segments side by side, as long as segments have blocks. Places
    /// without such a segment repeat another one and discard the result.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    /// - There are at most `N` segments. The words, the spare and the room for `blocks` blocks at
    ///   `out` of each are valid, and what is written of them belongs to that segment alone.
    unsafe fn advance<const N: usize>(&self, segments: &mut [SegmentDecoder]) -> Result<()> {
        let mut spares = [const { Spare::NEW }; N];
        let mut sink = [0; BLOCK];
        let spare_pointer = spares.as_mut_ptr();
        while let Some(some) =
            segments.iter().filter(|segment| segment.blocks > 0).min_by_key(|l| l.blocks)
        {
            let some = *some;
            let mut work = from_fn::<_, N, _>(|i| match segments.get(i) {
                Some(segment) if segment.blocks > 0 => (*segment, BLOCK),
                _ => {
                    // SAFETY: `i < N`, the number of spares.
                    let spare = unsafe { spare_pointer.add(i) };
                    (some.discarding_copy(spare, &mut sink), 0)
                }
            });
            // SAFETY: each segment writes only memory of its own, or `sink`, which is never
            // read; each has `some.blocks` blocks of room or the stride 0.
            unsafe { self.blocks(&mut work, some.blocks)? };
            for (segment, (done, stride)) in segments.iter_mut().zip(work) {
                if stride > 0 {
                    *segment = done;
                    segment.blocks -= some.blocks;
                }
            }
        }
        Ok(())
    }

    /// Decodes `blocks` blocks of each segment; a segment's stride is the distance between its
    /// blocks in the output.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    /// - The words and the spare of each segment and the room for its blocks are valid.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks<const N: usize>(
        &self,
        segments: &mut [(SegmentDecoder, usize); N],
        blocks: usize,
    ) -> Result<()> {
        let tables = Tables::load(self);
        let mut first = Pair::load([&segments[0].0, &segments[1].0]);
        let mut second = Pair::load([&segments[N - 2].0, &segments[N - 1].0]);
        let mut steps = [[_mm512_setzero_si512(); RUN]; 2];
        for _ in 0..blocks {
            for (segment, _) in segments.iter_mut() {
                // SAFETY: as for this function; `check` follows every use of words.
                unsafe { segment.words.ensure(BLOCK_AHEAD) };
            }
            let mut next: [_; N] = from_fn(|i| segments[i].0.words.next);
            for k in (0..RUN).step_by(2) {
                for k in [k, k + 1] {
                    steps[0][k] = first.step(&tables);
                    if N == 4 {
                        steps[1][k] = second.step(&tables);
                    }
                }
                // SAFETY: one of the RUN / 2 loads that were ensured, for each segment.
                unsafe {
                    first.a.refill(&mut next[0]);
                    first.b.refill(&mut next[1]);
                    if N == 4 {
                        second.a.refill(&mut next[N - 2]);
                        second.b.refill(&mut next[N - 1]);
                    }
                }
            }
            for (segment, next) in segments.iter_mut().zip(next) {
                segment.0.words.next = next;
            }
            // SAFETY: as for this function: the room for each segment's block is valid.
            unsafe {
                first.finish(&steps[0], &mut segments[..2], self.escape)?;
                if N == 4 {
                    second.finish(&steps[1], &mut segments[2..], self.escape)?;
                }
            }
        }
        first.store(&mut segments[..2]);
        if N == 4 {
            second.store(&mut segments[2..]);
        }
        Ok(())
    }
}

/// The tables of a [`Decoder`] in registers.
struct Tables {
    freq: [__m512i; 4],
    carry: [__m512i; 4],
    symbol: [__m512i; 4],
    /// The word 1, 32 times. The number is hidden from the compiler, which would otherwise replace
    /// additions under a mask by slower code.
    one: __m512i,
}

impl Tables {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load(decoder: &Decoder) -> Self {
        Self {
            freq: rows(&decoder.freq),
            carry: rows(&decoder.carry),
            symbol: rows(&decoder.symbol),
            one: _mm512_set1_epi16(std::hint::black_box(1)),
        }
    }
}

/// A table of 256 bytes in registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn rows(table: &[u8; 256]) -> [__m512i; 4] {
    // SAFETY: four times 64 of the 256 bytes.
    from_fn(|i| unsafe { _mm512_loadu_si512(table.as_ptr().add(64 * i).cast()) })
}

/// The table's bytes at 64 indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up(table: &[__m512i; 4], index: __m512i, upper: __mmask64) -> __m512i {
    let a = _mm512_permutex2var_epi8(table[0], index, table[1]);
    let b = _mm512_permutex2var_epi8(table[2], index, table[3]);
    _mm512_mask_blend_epi8(upper, a, b)
}

/// The states of a segment: low and high halves.
#[derive(Clone, Copy)]
struct States {
    low: __m512i,
    high: __m512i,
}

/// The states of two segments whose symbols are looked up together.
#[derive(Clone, Copy)]
struct Pair {
    a: States,
    b: States,
}

impl Pair {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load([a, b]: [&SegmentDecoder; 2]) -> Self {
        Self {
            a: States { low: load(&a.low), high: load(&a.high) },
            b: States { low: load(&b.low), high: load(&b.high) },
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(self, segments: &mut [(SegmentDecoder, usize)]) {
        for ((segment, _), states) in segments.iter_mut().zip([self.a, self.b]) {
            store16(&mut segment.low, states.low);
            store16(&mut segment.high, states.high);
        }
    }

    /// One step; returns the symbols of both segments, interleaved.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn step(&mut self, tables: &Tables) -> __m512i {
        let (a, b) = (&mut self.a, &mut self.b);
        let slots = _mm512_mask_blend_epi8(ODD, a.low, _mm512_slli_epi16::<8>(b.low));
        let upper = _mm512_movepi8_mask(slots);
        let freq = look_up(&tables.freq, slots, upper);
        let carry = look_up(&tables.carry, slots, upper);
        a.low = _mm512_mask_blend_epi8(ODD, carry, a.low);
        b.low = _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16::<8>(carry), b.low);
        a.scale(_mm512_slli_epi16::<8>(freq), tables.one);
        b.scale(_mm512_maskz_mov_epi8(ODD, freq), tables.one);
        look_up(&tables.symbol, slots, upper)
    }

    /// Writes the symbols of a block, escapes included, to each segment's next place.
    ///
    /// # Safety
    /// - As for [`Decoder::blocks`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    unsafe fn finish(
        &mut self,
        steps: &[__m512i; RUN],
        segments: &mut [(SegmentDecoder, usize)],
        escape: Option<u8>,
    ) -> Result<()> {
        let marker = _mm512_set1_epi8(escape.unwrap_or(0) as i8);
        for (n, (segment, stride)) in segments.iter_mut().enumerate() {
            segment.words.check()?;
            let rows = to_symbols(steps, n);
            let mut escapes = [0; 4];
            for j in 0..4 {
                // SAFETY: 64 of the BLOCK bytes of the output.
                unsafe { _mm512_storeu_si512(segment.out.add(64 * j).cast(), rows[j]) };
                escapes[j] = _mm512_cmpeq_epi8_mask(rows[j], marker);
            }
            let any = escapes[0] | escapes[1] | escapes[2] | escapes[3];
            if any != 0 && escape.is_some() {
                let states = if n == 0 { &mut self.a } else { &mut self.b };
                // SAFETY: as for this function.
                unsafe { states.take_escapes(segment, escapes)? };
            }
            // SAFETY: the next block, or the end of the last one.
            segment.out = unsafe { segment.out.add(*stride) };
        }
        Ok(())
    }
}

impl States {
    /// `freq * (high << 16 | low) / 2^16`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn scale(&mut self, freq: __m512i, one: __m512i) {
        let rest = _mm512_mulhi_epu16(freq, self.low);
        self.low = _mm512_add_epi16(_mm512_mullo_epi16(freq, self.high), rest);
        let carried = _mm512_cmplt_epu16_mask(self.low, rest);
        let high = _mm512_mulhi_epu16(freq, self.high);
        self.high = _mm512_mask_add_epi16(high, carried, high, one);
    }

    /// Gives a word to every lane whose state is below 2^16.
    ///
    /// # Safety
    /// - The 64 bytes at `next` may be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
    unsafe fn refill(&mut self, next: &mut *const u8) {
        let needs = _mm512_testn_epi16_mask(self.high, self.high);
        self.high = _mm512_mask_mov_epi16(self.high, needs, self.low);
        // SAFETY: as for this function; at most 32 words are taken.
        unsafe {
            let words = _mm512_loadu_si512(next.cast());
            self.low = _mm512_mask_expand_epi16(self.low, needs, words);
            *next = next.add(2 * needs.count_ones() as usize);
        }
    }

    /// Puts the symbols that follow a block in the places of its escapes, which `escapes` marks with a
    /// bit for each symbol of `rows`. In each round every lane with escapes left fills its first one.
    ///
    /// # Safety
    /// - Segment and spare of `words` are valid, and [`Words::check`] has succeeded.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
    unsafe fn take_escapes(
        &mut self,
        segment: &mut SegmentDecoder,
        escapes: [u64; 4],
    ) -> Result<()> {
        let [e0, e1, e2, e3] = escapes.map(|e| e as i64);
        // Byte `l` has a bit for each escape of lane `l`.
        let mut left = _mm256_setr_epi64x(e0, e1, e2, e3);
        loop {
            let served = _mm256_test_epi8_mask(left, left);
            if served == 0 {
                return Ok(());
            }
            // The lowest bit set in each byte.
            let first = _mm256_and_si256(left, _mm256_sub_epi8(_mm256_setzero_si256(), left));
            left = _mm256_andnot_si256(first, left);
            let (lower, upper) =
                (_mm256_castsi256_si128(first), _mm256_extracti128_si256::<1>(first));
            let places = [
                _mm_cvtsi128_si64(lower),
                _mm_extract_epi64::<1>(lower),
                _mm_cvtsi128_si64(upper),
                _mm_extract_epi64::<1>(upper),
            ];
            for (j, places) in places.into_iter().enumerate() {
                // For every symbol of a row, the low byte of its lane's state.
                let bytes = _mm512_permutexvar_epi8(load(&LOW_BYTES[j]), self.low);
                // SAFETY: 64 of the BLOCK bytes of the output.
                unsafe {
                    _mm512_mask_storeu_epi8(segment.out.add(64 * j).cast(), places as u64, bytes);
                }
            }
            self.low = _mm512_mask_shrdi_epi16::<8>(self.low, served, self.low, self.high);
            self.high = _mm512_mask_srli_epi16::<8>(self.high, served, self.high);
            // SAFETY: as for this function; the words are checked after each round.
            unsafe {
                segment.words.ensure(64);
                self.refill(&mut segment.words.next);
            }
            segment.words.check()?;
        }
    }
}

/// For each symbol of the four rows of a block, where the low byte of its lane's state is.
static LOW_BYTES: [[u8; 64]; 4] = {
    let mut all = [[0; 64]; 4];
    let mut i = 0;
    while i < BLOCK {
        all[i / 64][i % 64] = (i / RUN * 2) as u8;
        i += 1;
    }
    all
};

#[inline]
#[target_feature(enable = "avx512f")]
fn store16(words: &mut [u16; LANES], value: __m512i) {
    // SAFETY: the reference is to 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), value) }
}
