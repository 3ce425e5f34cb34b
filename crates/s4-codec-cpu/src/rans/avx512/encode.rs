//! Encoding.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::{Error, Result};

use super::super::digits::reciprocal;
use super::super::part::Part;
use super::super::stream::{BLOCK, LANES, RUN};
use super::super::table::Table;
use super::transpose::{load, to_steps};

/// Symbols that can be looked up, including the escape.
const CODES: usize = 64;
/// The code of the escape.
const ESCAPE: u8 = CODES as u8 - 1;

/// The encoder's look-up tables.
#[repr(align(64))]
pub(crate) struct Encoder {
    /// The code of each symbol: its index in the table, or [`ESCAPE`].
    code: [u8; 256],
    /// For each code, the frequency (low byte) and the first slot (high byte).
    slots: [u16; CODES],
    /// For each code, the reciprocal of the frequency and its shift.
    multiplier: [u16; CODES],
    shift: [u16; CODES],
    /// The symbol that blocks are padded with.
    padding: u8,
    escapes: bool,
}

/// A segment being encoded, at a block boundary.
pub(super) struct SegmentEncoder<'a, 'b> {
    pub(super) part: &'a mut Part<'b>,
    low: [u16; LANES],
    high: [u16; LANES],
    /// Blocks that are not encoded yet: the first ones of the segment.
    pub(super) blocks: usize,
    /// Start of the words written so far.
    pub(super) at: usize,
}

impl Encoder {
    /// The encoder for a table of `P = 8`; `None` if it has no symbols or too many for the look-up.
    pub(crate) fn new(table: &Table) -> Option<Self> {
        if table.entries().is_empty() || table.entries().len() >= CODES {
            return None;
        }
        let mut this = Self {
            code: [ESCAPE; 256],
            slots: [0; CODES],
            multiplier: [0; CODES],
            shift: [0; CODES],
            padding: table.padding(),
            escapes: table.escape() > 0,
        };
        for (i, (entry, start)) in table.slots().enumerate() {
            this.code[usize::from(entry.symbol)] = i as u8;
            this.set(i, entry.freq, start);
        }
        if this.escapes {
            this.set(ESCAPE.into(), table.escape(), 0);
        }
        Some(this)
    }

    fn set(&mut self, code: usize, freq: u16, start: u16) {
        self.slots[code] = freq | start << 8;
        (self.multiplier[code], self.shift[code]) = reciprocal(freq);
    }

    /// Encodes up to four segments side by side.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is not in the table and there is no escape.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    pub(crate) unsafe fn group(&self, parts: &mut [Part<'_>]) -> Result<()> {
        let mut segments: Vec<_> = parts.iter_mut().map(SegmentEncoder::new).collect();
        for segment in &mut segments {
            if let Some(block) = segment.part.last_block(self.padding) {
                // SAFETY: as for this function.
                unsafe { self.blocks(&mut [segment], &[&block], 1)? };
            }
        }
        // SAFETY: as for this function.
        unsafe {
            for four in segments.chunks_exact_mut(4) {
                self.together::<4>(four)?;
            }
            for two in segments.chunks_mut(2).filter(|two| two.len() == 2) {
                self.together::<2>(two)?;
            }
            for one in segments.chunks_mut(1) {
                self.together::<1>(one)?;
            }
        }
        segments.into_iter().for_each(SegmentEncoder::finish);
        Ok(())
    }

    /// Encodes as many blocks of each of `N` segments as all of them have left.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    unsafe fn together<const N: usize>(
        &self,
        segments: &mut [SegmentEncoder<'_, '_>],
    ) -> Result<()> {
        let blocks = segments.iter().map(|segment| segment.blocks).min().unwrap_or(0);
        let Some(segments) = segments.first_chunk_mut::<N>() else { return Ok(()) };
        let mut segments = segments.each_mut();
        let sources: [&[u8]; N] = from_fn(|i| {
            let end = segments[i].blocks * BLOCK;
            &segments[i].part.symbols[end - blocks * BLOCK..end]
        });
        // SAFETY: as for this function.
        unsafe { self.blocks(&mut segments, &sources, blocks)? };
        segments.iter_mut().for_each(|segment| segment.blocks -= blocks);
        Ok(())
    }

    /// Encodes `blocks` blocks of `N` segments, the last one of `sources` first.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks<const N: usize>(
        &self,
        segments: &mut [&mut SegmentEncoder<'_, '_>; N],
        sources: &[&[u8]; N],
        blocks: usize,
    ) -> Result<()> {
        let tables = Tables::load(self);
        let mut states: [States; 4] = [States::ZERO; 4];
        for i in 0..N {
            states[i] = States::load(segments[i]);
        }
        let [mut s0, mut s1, mut s2, mut s3] = states;
        let mut codes = [[_mm512_setzero_si512(); RUN / 2]; N];
        for block in (0..blocks).rev() {
            let mut next = [std::ptr::null_mut(); N];
            for i in 0..N {
                let symbols: &[u8; BLOCK] =
                    sources[i][block * BLOCK..].first_chunk().ok_or_else(no_room)?;
                let (rows, escapes) = tables.codes(symbols);
                codes[i] = to_steps(&rows);
                let words = &mut segments[i].part.words[..segments[i].at];
                if words.len() < MOST_BLOCK {
                    return Err(no_room());
                }
                next[i] = words.as_mut_ptr_range().end;
                if escapes != [0; 4] {
                    if !self.escapes {
                        return Err(Error::unsupported(
                            "symbol is not in its table, which has no escape",
                        ));
                    }
                    let s = [&mut s0, &mut s1, &mut s2, &mut s3];
                    for (j, s) in s.into_iter().enumerate() {
                        if i == j {
                            // SAFETY: the escapes of a block emit at most half of MOST_BLOCK bytes.
                            unsafe { s.put_escapes(&mut next[i], symbols, escapes) };
                        }
                    }
                }
            }
            for pair in (0..RUN / 2).rev() {
                let of = |i: usize| tables.look_up_two(codes[i % N][pair]);
                // SAFETY: each pair of steps emits at most 64 bytes, an eighth of MOST_BLOCK.
                unsafe {
                    s0.pair(&of(0), &mut next[0]);
                    if N > 1 {
                        s1.pair(&of(1), &mut next[1 % N]);
                    }
                    if N > 2 {
                        s2.pair(&of(2), &mut next[2 % N]);
                        s3.pair(&of(3), &mut next[3 % N]);
                    }
                }
            }
            for i in 0..N {
                segments[i].at = next[i] as usize - segments[i].part.words.as_ptr() as usize;
            }
        }
        for (segment, states) in segments.iter_mut().zip([s0, s1, s2, s3]) {
            states.store(segment);
        }
        Ok(())
    }
}

/// The most bytes that a block emits: a word of each lane for each pair of steps, and as many for
/// its escapes.
pub(super) const MOST_BLOCK: usize = 2 * LANES * RUN;

#[cold]
pub(super) fn no_room() -> Error {
    Error::limit("rans: output buffer is too small for the words")
}

impl<'a, 'b> SegmentEncoder<'a, 'b> {
    pub(super) fn new(part: &'a mut Part<'b>) -> Self {
        let (low, high) = (part.start.map(|x| x as u16), part.start.map(|x| (x >> 16) as u16));
        let (blocks, at) = (part.symbols.len() / BLOCK, part.words.len());
        Self { part, low, high, blocks, at }
    }

    /// Stores the states and the length in the part.
    pub(super) fn finish(self) {
        for (l, state) in self.part.states.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *state = (u32::from(self.high[l]) << 16 | u32::from(self.low[l])).to_le_bytes();
        }
        self.part.len = self.part.words.len() - self.at;
    }
}

/// The tables of an [`Encoder`] in registers.
struct Tables {
    code: [__m512i; 4],
    slots: [__m512i; 2],
    multiplier: [__m512i; 2],
    shift: [__m512i; 2],
}

impl Tables {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(encoder: &Encoder) -> Self {
        let both = |words: &[u16; CODES]| {
            let (halves, _) = words.as_chunks::<LANES>();
            [load(&halves[0]), load(&halves[1])]
        };
        let (rows, _) = encoder.code.as_chunks::<64>();
        Self {
            code: [load(&rows[0]), load(&rows[1]), load(&rows[2]), load(&rows[3])],
            slots: both(&encoder.slots),
            multiplier: both(&encoder.multiplier),
            shift: both(&encoder.shift),
        }
    }

    /// The codes of a block's symbols, and a bit for each that is escaped.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn codes(&self, symbols: &[u8; BLOCK]) -> ([__m512i; 4], [u64; 4]) {
        let (rows, _) = symbols.as_chunks::<64>();
        let mut codes = [_mm512_setzero_si512(); 4];
        let mut escapes = [0; 4];
        for i in 0..4 {
            let row = load(&rows[i]);
            let a = _mm512_permutex2var_epi8(self.code[0], row, self.code[1]);
            let b = _mm512_permutex2var_epi8(self.code[2], row, self.code[3]);
            codes[i] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(row), a, b);
            escapes[i] = _mm512_cmpeq_epi8_mask(codes[i], _mm512_set1_epi8(ESCAPE as i8));
        }
        (codes, escapes)
    }

    /// Looks up the codes in the low bytes of the words of `codes`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn look_up(&self, codes: __m512i) -> Symbol {
        let of = |table: &[__m512i; 2]| _mm512_permutex2var_epi16(table[0], codes, table[1]);
        let slots = of(&self.slots);
        Symbol {
            freq: _mm512_and_si512(slots, _mm512_set1_epi16(0xff)),
            start: _mm512_srli_epi16::<8>(slots),
            multiplier: of(&self.multiplier),
            shift: of(&self.shift),
        }
    }

    /// Looks up two steps, whose codes are the low and the high bytes of the words of `codes`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn look_up_two(&self, codes: __m512i) -> [Symbol; 2] {
        [self.look_up(codes), self.look_up(_mm512_srli_epi16::<8>(codes))]
    }
}

/// The encoder's parameters of 32 symbols, as words.
pub(super) struct Symbol {
    pub(super) freq: __m512i,
    pub(super) start: __m512i,
    pub(super) multiplier: __m512i,
    pub(super) shift: __m512i,
}

impl Symbol {
    /// `n / freq` for `n < 256 * freq` (see `digits`).
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn quotient(&self, n: __m512i) -> __m512i {
        let n = _mm512_add_epi16(n, _mm512_mulhi_epu16(n, self.multiplier));
        _mm512_srlv_epi16(n, self.shift)
    }

    /// `n - q * freq`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn rest(&self, n: __m512i, q: __m512i) -> __m512i {
        _mm512_sub_epi16(n, _mm512_mullo_epi16(q, self.freq))
    }
}

/// The states of a segment: low and high halves.
#[derive(Clone, Copy)]
pub(super) struct States {
    low: __m512i,
    high: __m512i,
}

impl States {
    const ZERO: Self = {
        // SAFETY: all bits zero is a value of a vector.
        let zero = unsafe { std::mem::zeroed() };
        Self { low: zero, high: zero }
    };

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn load(segment: &SegmentEncoder<'_, '_>) -> Self {
        Self { low: load(&segment.low), high: load(&segment.high) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn store(self, segment: &mut SegmentEncoder<'_, '_>) {
        // SAFETY: the references are to 64 writable bytes.
        unsafe {
            _mm512_storeu_si512(segment.low.as_mut_ptr().cast(), self.low);
            _mm512_storeu_si512(segment.high.as_mut_ptr().cast(), self.high);
        }
    }

    /// Codes the symbols of two steps, the second one first.
    ///
    /// # Safety
    /// - The 64 bytes before `next` may be written.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi2")]
    pub(super) unsafe fn pair(&mut self, [first, second]: &[Symbol; 2], next: &mut *mut u8) {
        let limit = _mm512_mullo_epi16(first.freq, second.freq);
        let full = _mm512_cmpge_epu16_mask(self.high, limit);
        // SAFETY: as for this function.
        unsafe { self.emit(full, next) };
        self.step(second);
        self.step(first);
    }

    /// Emits the low halves of the lanes in `full` and replaces them by the high halves.
    ///
    /// # Safety
    /// - The 64 bytes before `next` may be written.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi2")]
    unsafe fn emit(&mut self, full: __mmask32, next: &mut *mut u8) {
        let words = _mm512_maskz_compress_epi16(full, self.low);
        let count = full.count_ones();
        // SAFETY: as for this function; `count <= 32` words are written.
        unsafe {
            *next = next.sub(2 * count as usize);
            _mm512_mask_storeu_epi16(next.cast(), _bzhi_u32(!0, count), words);
        }
        self.low = _mm512_mask_mov_epi16(self.low, full, self.high);
        self.high = _mm512_maskz_mov_epi16(!full, self.high);
    }

    /// `x = (x / freq) << 8 | start + x % freq`, dividing byte by byte as in long division.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
    fn step(&mut self, symbol: &Symbol) {
        let n = self.high;
        let q2 = symbol.quotient(n);
        let n = _mm512_shldi_epi16::<8>(symbol.rest(n, q2), self.low);
        let q1 = symbol.quotient(n);
        let low = _mm512_slli_epi16::<8>(self.low);
        let n = _mm512_shldi_epi16::<8>(symbol.rest(n, q1), low);
        let q0 = symbol.quotient(n);
        self.high = _mm512_or_si512(_mm512_slli_epi16::<8>(q2), q1);
        // q0 * 256 + n % freq + start, with n % freq = n - q0 * freq.
        let less = _mm512_sub_epi16(_mm512_set1_epi16(256), symbol.freq);
        let n = _mm512_add_epi16(n, symbol.start);
        self.low = _mm512_add_epi16(n, _mm512_mullo_epi16(q0, less));
    }

    /// Codes the escapes of a block, marked by a bit for each of its symbols: the last round first.
    ///
    /// # Safety
    /// - The 64 * RUN / 2 bytes before `next` may be written.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt,bmi1,bmi2")]
    pub(super) unsafe fn put_escapes(
        &mut self,
        next: &mut *mut u8,
        symbols: &[u8; BLOCK],
        escapes: [u64; 4],
    ) {
        let mut rounds = [(0u32, [0u16; LANES]); RUN];
        let mut count = 0;
        for (row, mut bits) in escapes.into_iter().enumerate() {
            while bits != 0 {
                let i = 64 * row + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let lane = i / RUN;
                // The lane's earlier escapes are in the earlier rounds.
                let round = rounds.iter().position(|(lanes, _)| lanes >> lane & 1 == 0);
                let round = round.unwrap_or(RUN - 1);
                rounds[round].0 |= 1 << lane;
                rounds[round].1[lane] = symbols[i].into();
                count = count.max(round + 1);
            }
        }
        for (lanes, values) in rounds[..count].iter().rev() {
            let full = _mm512_mask_cmpge_epu16_mask(*lanes, self.high, _mm512_set1_epi16(256));
            // SAFETY: as for this function: a lane emits in at most one of two rounds, as its state
            // grows by 8 bits in each.
            unsafe { self.emit(full, next) };
            let [low, high] = [self.low, self.high];
            self.high = _mm512_mask_shldi_epi16::<8>(high, *lanes, high, low);
            let appended = _mm512_or_si512(_mm512_slli_epi16::<8>(low), load(values));
            self.low = _mm512_mask_mov_epi16(low, *lanes, appended);
        }
    }
}
