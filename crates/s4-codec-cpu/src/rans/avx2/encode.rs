//! Encoding.

use std::arch::x86_64::*;

use s4_format::{Error, Result};

use super::super::digits::reciprocal32;
use super::super::part::Part;
use super::super::scalar::put_escapes;
use super::super::stream::{BLOCK, LANES, RUN};
use super::super::table::Table;
use super::{WIDTH, load, store};

/// The most bytes that a block emits with precision `P`, with those that it may overwrite before them: a word of
/// each lane for each renormalisation, and one for every second escape.
pub(super) const fn most_block(p: u32) -> usize {
    2 * LANES * (RUN / if p == 8 { 2 } else { 1 } + RUN / 2)
}

/// For each set of lanes, the shuffle that moves the words of these lanes to the end, in order.
static GATHER: Gather = Gather({
    let mut all = [[0; 2 * WIDTH]; 256];
    let mut set = 0usize;
    while set < 256 {
        let mut place = WIDTH - set.count_ones() as usize;
        let mut lane = 0;
        while lane < WIDTH {
            if set >> lane & 1 == 1 {
                all[set][2 * place] = 2 * lane as u8;
                all[set][2 * place + 1] = 2 * lane as u8 + 1;
                place += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    all
});

#[repr(align(16))]
struct Gather([[u8; 2 * WIDTH]; 256]);

/// A symbol's parameters for the encoder, loaded as 8 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Code {
    multiplier: u32,
    /// With `P = 8`, 256 minus the frequency, the frequency, the first slot (8 bits each) and the shift; with
    /// `P = 12`, the frequency, the first slot (12 bits each) and the shift. Marks are in the bits above the shift.
    rest: u32,
}

impl Code {
    /// The mark of a symbol that is escaped.
    pub(super) const ESCAPED: u32 = 1 << 31;
    /// The mark of a symbol that neither is in its table nor can be escaped.
    pub(super) const LACKING: u32 = 1 << 30;

    /// The code of a symbol of precision `P`; `None` if the symbol has all slots.
    pub(super) fn new<const P: u32>(freq: u16, start: u16) -> Option<Self> {
        let (multiplier, shift) = reciprocal32(freq);
        let [freq, start, shift] = [freq.into(), start.into(), u32::from(shift)];
        let less = (1u32 << P).checked_sub(freq).filter(|less| *less > 0)?;
        let rest = if P == 8 { less | freq << 8 | start << 16 } else { freq | start << 12 };
        Some(Self { multiplier, rest: rest | shift << 24 })
    }

    /// The code with a mark, which [`Codes::take_escapes`] must remove before the code is used.
    pub(super) fn marked(self, mark: u32) -> Self {
        Self { rest: self.rest | mark, ..self }
    }
}

/// The codes of all symbols; symbols that the table lacks have the code of the escape.
pub(crate) struct Encoder<const P: u32> {
    codes: [Code; 256],
    /// The symbols of the table.
    known: Set,
    /// Whether other symbols can be escaped.
    escapes: bool,
    padding: u8,
}

impl<const P: u32> Encoder<P> {
    /// The encoder for a table of precision `P`; `None` for one without symbols or with a single one.
    pub(crate) fn new(table: &Table) -> Option<Self> {
        let escapes = table.escape() > 0;
        let mut this = Self {
            codes: [Code::new::<P>(table.escape().max(1), 0)?; 256],
            known: Set::default(),
            escapes,
            padding: table.padding(),
        };
        for (entry, start) in table.slots() {
            this.codes[usize::from(entry.symbol)] = Code::new::<P>(entry.freq, start)?;
            this.known.insert(entry.symbol);
        }
        Some(this)
    }

    /// Encodes one segment.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is not in the table and there is no escape.
    ///
    /// # Safety
    /// - The machine has AVX2.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    pub(crate) unsafe fn segment(&self, part: &mut Part<'_>) -> Result<()> {
        let mut states = part.start;
        let mut at = part.words.len();
        let last = part.last_block(self.padding);
        let (blocks, _) = part.symbols.as_chunks::<BLOCK>();
        // SAFETY: as for this function.
        unsafe {
            self.blocks(&mut states, last.as_slice(), part.words, &mut at)?;
            self.blocks(&mut states, blocks, part.words, &mut at)?;
        }
        part.len = part.words.len() - at;
        for (state, x) in part.states.as_chunks_mut::<4>().0.iter_mut().zip(states) {
            *state = x.to_le_bytes();
        }
        Ok(())
    }

    /// Encodes blocks, the last one first, into the bytes before `at` in `words`.
    ///
    /// # Safety
    /// - The machine has AVX2.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn blocks(
        &self,
        states: &mut [u32; LANES],
        blocks: &[[u8; BLOCK]],
        words: &mut [u8],
        at: &mut usize,
    ) -> Result<()> {
        for block in blocks.iter().rev() {
            if *at < most_block(P) {
                return Err(Error::limit("rans: output buffer is too small for the words"));
            }
            let missing = self.known.missing(block);
            if missing != [0; LANES] {
                if !self.escapes {
                    return Err(Error::unsupported(
                        "symbol is not in its table, which has no escape",
                    ));
                }
                put_escapes(states, block, &missing, words, at);
            }
            let mut next = words[..*at].as_mut_ptr_range().end;
            // SAFETY: a renormalisation emits at most 16 bytes for each register, and always writes 16.
            // There is room for those of all that remain: escapes have taken at most their share.
            unsafe { self.steps(states, block, &mut next) };
            *at = next as usize - words.as_ptr() as usize;
        }
        Ok(())
    }

    /// The steps of a block.
    ///
    /// # Safety
    /// - The machine has AVX2.
    /// - 16 bytes before `next` may be written for each register and renormalisation.
    #[inline]
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn steps(&self, states: &mut [u32; LANES], block: &[u8; BLOCK], next: &mut *mut u8) {
        let mut x = load(states);
        let together = if P == 8 { 2 } else { 1 };
        for first in (0..RUN).step_by(together).rev() {
            unrolled!(V in [3 2 1 0] {
                let symbols = &block.as_chunks::<{ WIDTH * RUN }>().0[V];
                // The remainder shows the compiler that the index is in bounds.
                let of = |k: usize| {
                    move |lane: usize| {
                        &raw const self.codes[usize::from(symbols[RUN * lane + k % RUN])]
                    }
                };
                // SAFETY: each pointer is to a code; `next` is as for this function.
                unsafe {
                    if P == 8 {
                        let (second, first) = (look_up(of(first + 1)), look_up(of(first)));
                        put_two(&mut x[V], &first, &second, next);
                    } else {
                        put_one(&mut x[V], &look_up(of(first)), next);
                    }
                }
            });
        }
        store(x, states);
    }
}

/// The codes of 8 lanes.
///
/// # Safety
/// - Each pointer is to a code.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn look_up(of: impl Fn(usize) -> *const Code) -> Codes {
    let code = |lane: usize| of(lane).cast();
    // SAFETY: each pointer is to a code of 8 bytes.
    let (a, b, c, d) = unsafe {
        let two = |i, j| _mm_loadh_pd(_mm_load_sd(code(i)), code(j));
        (two(0, 1), two(4, 5), two(2, 3), two(6, 7))
    };
    let a = _mm256_castpd_ps(_mm256_set_m128d(b, a));
    let c = _mm256_castpd_ps(_mm256_set_m128d(d, c));
    Codes {
        multiplier: _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, c)),
        rest: _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, c)),
    }
}

/// A set of symbols, as bits: bit `h % 8` of byte `l` of half `h / 8` is the symbol `16 * h + l`.
#[derive(Default)]
struct Set([[u8; 16]; 2]);

impl Set {
    fn insert(&mut self, symbol: u8) {
        let [high, low] = [symbol >> 4, symbol & 15].map(usize::from);
        self.0[high / 8][low] |= 1 << (high % 8);
    }

    /// For each lane of a block, a bit for each of its symbols that is not in the set.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn missing(&self, block: &[u8; BLOCK]) -> [u8; LANES] {
        const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
        // SAFETY: each pointer is to 16 readable bytes.
        let table = |row: &[u8; 16]| unsafe {
            _mm256_broadcastsi128_si256(_mm_loadu_si128(row.as_ptr().cast()))
        };
        let (lower, upper, bits) = (table(&self.0[0]), table(&self.0[1]), table(&BITS));
        let mut missing = [0; LANES];
        for (marks, row) in missing.as_chunks_mut().0.iter_mut().zip(block.as_chunks::<32>().0) {
            // SAFETY: the pointer is to 32 readable bytes.
            let symbols = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
            // A shuffle gives 0 where the index has its top bit set.
            let flipped = _mm256_xor_si256(symbols, _mm256_set1_epi8(-128));
            let sets = _mm256_or_si256(
                _mm256_shuffle_epi8(lower, symbols),
                _mm256_shuffle_epi8(upper, flipped),
            );
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(symbols), _mm256_set1_epi8(15));
            let found = _mm256_and_si256(sets, _mm256_shuffle_epi8(bits, high));
            let none = _mm256_cmpeq_epi8(found, _mm256_setzero_si256());
            *marks = _mm256_movemask_epi8(none).to_le_bytes();
        }
        missing
    }
}

/// The codes of 8 lanes: the multipliers, and the other fields.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    multiplier: __m256i,
    rest: __m256i,
}

impl Codes {
    pub(super) const ZERO: Self = {
        // SAFETY: all bits zero is a valid vector.
        unsafe { std::mem::zeroed() }
    };

    /// Adds the marks of the codes to `marks`, which also gets other bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn add_marks(&self, marks: &mut __m256i) {
        *marks = _mm256_or_si256(*marks, self.rest);
    }

    /// Whether any of the codes that were added to `marks` is marked.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn is_marked(marks: __m256i) -> bool {
        _mm256_testz_si256(marks, Self::marked()) == 0
    }

    /// Removes the marks. Returns a bit for each lane whose symbol is escaped; `lacking` is set if one
    /// can be neither coded nor escaped.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn take_escapes(&mut self, lacking: &mut bool) -> u8 {
        // `ESCAPED` is the top bit of a lane, `LACKING` the one below.
        let of = |rest| _mm256_movemask_ps(_mm256_castsi256_ps(rest)) as u8;
        *lacking |= of(_mm256_slli_epi32::<1>(self.rest)) != 0;
        let escaped = of(self.rest);
        self.rest = _mm256_andnot_si256(Self::marked(), self.rest);
        escaped
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn marked() -> __m256i {
        _mm256_set1_epi32((Code::ESCAPED | Code::LACKING).cast_signed())
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn freq<const P: u32>(&self) -> __m256i {
        let freq = if P == 8 { _mm256_srli_epi32::<8>(self.rest) } else { self.rest };
        _mm256_and_si256(freq, _mm256_set1_epi32((1 << P) - 1))
    }

    /// `2^P` minus the frequency.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn less<const P: u32>(&self) -> __m256i {
        if P == 8 {
            _mm256_and_si256(self.rest, _mm256_set1_epi32(0xff))
        } else {
            _mm256_sub_epi32(_mm256_set1_epi32(1 << P), self.freq::<P>())
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn start<const P: u32>(&self) -> __m256i {
        let start = if P == 8 {
            _mm256_srli_epi32::<16>(self.rest)
        } else {
            _mm256_srli_epi32::<12>(self.rest)
        };
        _mm256_and_si256(start, _mm256_set1_epi32((1 << P) - 1))
    }

    /// `(x / freq) << P | start + x % freq`, which is `x + (x / freq) * (2^P - freq) + start`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn step<const P: u32>(&self, x: __m256i) -> __m256i {
        let odd = |v| _mm256_srli_epi64::<32>(v);
        let even_products = _mm256_mul_epu32(x, self.multiplier);
        let odd_products = _mm256_mul_epu32(odd(x), odd(self.multiplier));
        let high = _mm256_blend_epi32::<0xaa>(odd(even_products), odd_products);
        let shift = _mm256_srli_epi32::<24>(self.rest);
        let quotient = _mm256_srlv_epi32(_mm256_add_epi32(x, high), shift);
        let rest = _mm256_add_epi32(x, self.start::<P>());
        _mm256_add_epi32(rest, _mm256_mullo_epi32(quotient, self.less::<P>()))
    }
}

/// Codes two symbols of each lane with `P = 8`, the second one first, after a single renormalisation.
///
/// # Safety
/// - The 16 bytes before `next` may be written.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn put_two(x: &mut __m256i, first: &Codes, second: &Codes, next: &mut *mut u8) {
    let limit = _mm256_mullo_epi16(first.freq::<8>(), second.freq::<8>());
    // SAFETY: as for this function.
    unsafe { emit(x, limit, next) };
    *x = first.step::<8>(second.step::<8>(*x));
}

/// Codes a symbol of each lane with `P = 12`.
///
/// # Safety
/// - The 16 bytes before `next` may be written.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn put_one(x: &mut __m256i, codes: &Codes, next: &mut *mut u8) {
    let limit = _mm256_slli_epi32::<4>(codes.freq::<12>());
    // SAFETY: as for this function.
    unsafe { emit(x, limit, next) };
    *x = codes.step::<12>(*x);
}

/// Emits the low half of every lane whose high half has reached `limit`.
///
/// # Safety
/// - The 16 bytes before `next` may be written.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn emit(x: &mut __m256i, limit: __m256i, next: &mut *mut u8) {
    let high = _mm256_srli_epi32::<16>(*x);
    let keeps = _mm256_cmpgt_epi32(limit, high);
    let set = !_mm256_movemask_ps(_mm256_castsi256_ps(keeps)) as usize & 0xff;
    let low = _mm256_blend_epi16::<0xaa>(*x, _mm256_setzero_si256());
    let words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
    // SAFETY: `GATHER` has 16 bytes for each set.
    let places = unsafe { _mm_load_si128(GATHER.0[set].as_ptr().cast()) };
    let words = _mm_shuffle_epi8(words, places);
    // SAFETY: as for this function; what is written before the words is overwritten by the next
    // ones or is not part of the output.
    unsafe {
        _mm_storeu_si128(next.sub(16).cast(), words);
        *next = next.sub(2 * set.count_ones() as usize);
    }
    *x = _mm256_blendv_epi8(high, *x, keeps);
}
