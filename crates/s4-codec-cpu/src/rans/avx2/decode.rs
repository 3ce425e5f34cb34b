//! Decoding.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::{Error, Result};

use super::super::scalar::{block_at, check_end, decode_escapes};
use super::super::stream::{BLOCK, Carry, LANES, RUN, Segment};
use super::super::table::{Precision, Table};
use super::super::words::{Spare, Words};
use super::{VECTORS, WIDTH};

/// Bytes that the steps of one block may read: 64 for each refill of all lanes.
const BLOCK_AHEAD: usize = 64 * RUN;

/// For each set of lanes, which word each takes: the number of lanes of the set before it.
static SPREAD: [[u8; WIDTH]; 256] = {
    let mut all = [[0; WIDTH]; 256];
    let mut set = 0;
    while set < 256 {
        let mut lane = 0;
        while lane < WIDTH {
            all[set][lane] = (set & ((1 << lane) - 1)).count_ones() as u8;
            lane += 1;
        }
        set += 1;
    }
    all
};

/// What each slot of each table stands for.
pub(crate) struct Decoder {
    /// Frequency, with `P = 12` less one (12 bits), place among the symbol's slots (12 bits), symbol (8 bits).
    slots: Vec<u32>,
    /// The symbol that stands for the escape, if there is one.
    escape: Option<u8>,
}

/// A segment to be decoded into `symbols`. Contexts are as many, or none if all are 0.
pub(crate) struct Job<'a> {
    pub(crate) segment: Segment<'a>,
    pub(crate) contexts: &'a [u8],
    pub(crate) symbols: &'a mut [u8],
}

/// A segment being decoded, at a block boundary: `contexts` and `symbols` are what is left of it.
struct Lane<'a> {
    states: [u32; LANES],
    words: Words,
    contexts: &'a [u8],
    symbols: &'a mut [u8],
}

impl<'a> Lane<'a> {
    fn new(job: Job<'a>, spare: &mut Spare) -> Result<Self> {
        let Job { segment, contexts, symbols } = job;
        let words = Words::new(&segment, spare);
        Ok(Self { states: segment.states()?, words, contexts, symbols })
    }

    /// Whole blocks that are left.
    fn blocks(&self) -> usize {
        self.symbols.len() / BLOCK
    }

    #[inline]
    fn next_block(&mut self) -> Result<&'a mut [u8; BLOCK]> {
        let (block, rest) =
            std::mem::take(&mut self.symbols).split_first_chunk_mut().ok_or_else(no_block)?;
        self.symbols = rest;
        Ok(block)
    }

    #[inline]
    fn next_contexts(&mut self) -> Result<&'a [u8; BLOCK]> {
        let (block, rest) = self.contexts.split_first_chunk().ok_or_else(no_block)?;
        self.contexts = rest;
        Ok(block)
    }
}

#[cold]
fn no_block() -> Error {
    Error::limit("rans: no room for a block")
}

impl Decoder {
    /// The decoder for some tables; `None` if there are escapes, but no byte that is not a symbol of
    /// any table and could stand for them.
    pub(crate) fn new(tables: &[Table]) -> Option<Self> {
        let mut seen = [false; 256];
        for entry in tables.iter().flat_map(Table::entries) {
            seen[usize::from(entry.symbol)] = true;
        }
        let mut escape = None;
        if tables.iter().any(|table| table.escape() > 0) {
            escape = Some(seen.iter().position(|seen| !seen)? as u8);
        }
        let mut slots = Vec::with_capacity(tables.len() << tables.first()?.precision().bits());
        let less = u32::from(tables.first()?.precision() == Precision::P12);
        for table in tables {
            let mut fill = |freq: u16, symbol: u8| {
                let slot = u32::from(freq).wrapping_sub(less) | u32::from(symbol) << 24;
                slots.extend((0..u32::from(freq)).map(|bias| slot | bias << 12));
            };
            fill(table.escape(), escape.unwrap_or(0));
            table.entries().iter().for_each(|entry| fill(entry.freq, entry.symbol));
        }
        Some(Self { slots, escape })
    }

    /// Decodes segments, two at a time: a step must wait for the one before it, but not for those of
    /// another segment. What each carries is appended to `carries`.
    ///
    /// # Errors
    /// `Corrupt` if a state or the number of words is wrong.
    ///
    /// # Safety
    /// - The machine has AVX2, and the tables are of this `P`.
    /// - Contexts are below the number of tables.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    pub(crate) unsafe fn segments<'a, const P: i32>(
        &self,
        mut jobs: impl Iterator<Item = Job<'a>>,
        carries: &mut Vec<Carry>,
    ) -> Result<()> {
        while let Some(job) = jobs.next() {
            let (mut spare, mut other_spare) = (Spare::NEW, Spare::NEW);
            let mut lane = Lane::new(job, &mut spare)?;
            let mut other = jobs.next().map(|job| Lane::new(job, &mut other_spare)).transpose()?;
            // SAFETY: the segments and the spares are there; the rest is as for this function.
            unsafe {
                if let Some(other) = &mut other {
                    let both = lane.blocks().min(other.blocks());
                    self.advance::<P, 2>([&mut lane, other], both)?;
                }
                for mut lane in std::iter::once(lane).chain(other) {
                    let left = lane.blocks();
                    self.advance::<P, 1>([&mut lane], left)?;
                    self.last_block::<P>(&mut lane)?;
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
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn last_block<const P: i32>(&self, lane: &mut Lane<'_>) -> Result<()> {
        let rest = std::mem::take(&mut lane.symbols);
        if rest.is_empty() {
            return Ok(());
        }
        let mut symbols = [0; BLOCK];
        let contexts = block_at(lane.contexts, 0, 0);
        let mut last = Lane { symbols: &mut symbols, contexts: &contexts, ..*lane };
        // SAFETY: as for this function.
        unsafe { self.blocks::<P, 1, true>([&mut last], 1)? };
        (lane.states, lane.words) = (last.states, last.words);
        rest.copy_from_slice(&symbols[..rest.len()]);
        Ok(())
    }

    /// Decodes `blocks` blocks of each lane.
    ///
    /// # Safety
    /// - As for [`Decoder::blocks`].
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn advance<const P: i32, const N: usize>(
        &self,
        lanes: [&mut Lane<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        // SAFETY: as for this function.
        unsafe {
            match lanes.iter().any(|lane| !lane.contexts.is_empty()) {
                true => self.blocks::<P, N, true>(lanes, blocks),
                false => self.blocks::<P, N, false>(lanes, blocks),
            }
        }
    }

    /// Decodes `blocks` blocks of each lane, with contexts if CONTEXTS is set.
    ///
    /// # Safety
    /// - The machine has AVX2, and the tables are of this `P`.
    /// - The segment and the spare of each lane are there; contexts are below the number of tables.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn blocks<const P: i32, const N: usize, const CONTEXTS: bool>(
        &self,
        mut lanes: [&mut Lane<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        let mut x: [_; N] = from_fn(|n| load(&lanes[n].states));
        let mut bases = [[[0; LANES]; RUN]; N];
        for _ in 0..blocks {
            for (lane, bases) in lanes.iter_mut().zip(&mut bases) {
                if CONTEXTS {
                    *bases = first_slots::<P>(lane.next_contexts()?);
                }
                // SAFETY: as for this function; `check` follows every use of words.
                unsafe { lane.words.ensure(BLOCK_AHEAD) };
            }
            let mut next: [_; N] = from_fn(|n| lanes[n].words.next);
            let mut halves = [[[_mm256_setzero_si256(); VECTORS]; 2]; N];
            for k in 0..RUN {
                for n in 0..N {
                    let base = load(&bases[n][k]);
                    // SAFETY: bases are as for this function; each refill is one of the loads that
                    // were ensured.
                    unsafe {
                        for v in 0..VECTORS {
                            let symbols = &mut halves[n][k / 4][v];
                            self.step::<P, CONTEXTS>(&mut x[n][v], base[v], symbols);
                        }
                        if P != 8 || k % 2 == 1 {
                            for x in &mut x[n] {
                                refill(x, &mut next[n]);
                            }
                        }
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
                    let states = &mut lane.states;
                    // SAFETY: as for this function, and `check` has succeeded.
                    unsafe {
                        lane.words.as_slice(|rest| take_escapes(states, rest, escapes, block))?;
                    }
                    x[n] = load(&lane.states);
                }
            }
        }
        for (lane, x) in lanes.iter_mut().zip(x) {
            store(x, &mut lane.states);
        }
        Ok(())
    }

    /// One step of 8 lanes, whose tables begin at the slots `bases`. The new symbols enter
    /// `symbols` from above.
    ///
    /// # Safety
    /// - The machine has AVX2, and the tables are of this `P`.
    /// - Each base is `2^P` times the number of a table.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn step<const P: i32, const CONTEXTS: bool>(
        &self,
        x: &mut __m256i,
        bases: __m256i,
        symbols: &mut __m256i,
    ) {
        let slot = _mm256_and_si256(*x, _mm256_set1_epi32((1 << P) - 1));
        let index = if CONTEXTS { _mm256_add_epi32(slot, bases) } else { slot };
        // SAFETY: every index is below the number of slots, as for this function.
        let slots = unsafe { _mm256_i32gather_epi32::<4>(self.slots.as_ptr().cast(), index) };
        let fields = _mm256_set1_epi32(0xfff);
        let freq = _mm256_and_si256(slots, fields);
        let bias = _mm256_and_si256(_mm256_srli_epi32::<12>(slots), fields);
        let whole = _mm256_srli_epi32::<P>(*x);
        *x = _mm256_add_epi32(_mm256_mullo_epi32(whole, freq), bias);
        if P == 12 {
            *x = _mm256_add_epi32(*x, whole);
        }
        let symbol = _mm256_andnot_si256(_mm256_set1_epi32(0x00ff_ffff), slots);
        *symbols = _mm256_or_si256(_mm256_srli_epi32::<8>(*symbols), symbol);
    }
}

/// Where the table of each symbol of a block begins, step by step.
fn first_slots<const P: i32>(contexts: &[u8; BLOCK]) -> [[u32; LANES]; RUN] {
    from_fn(|k| from_fn(|l| u32::from(contexts[l * RUN + k]) << P))
}

/// Gives a word to every lane below 2^16.
///
/// # Safety
/// - The 16 bytes at `next` may be read.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn refill(x: &mut __m256i, next: &mut *const u8) {
    let needs = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(*x), _mm256_setzero_si256());
    let set = _mm256_movemask_ps(_mm256_castsi256_ps(needs)) as usize;
    // SAFETY: `SPREAD` has 8 bytes for each set; for the words as for this function, of which at
    // most 8 are taken.
    let (spread, words) = unsafe {
        let spread = _mm_loadl_epi64(SPREAD[set].as_ptr().cast());
        let words = _mm_loadu_si128(next.cast());
        *next = next.add(2 * set.count_ones() as usize);
        (_mm256_cvtepu8_epi32(spread), _mm256_cvtepu16_epi32(words))
    };
    let words = _mm256_permutevar8x32_epi32(words, spread);
    let full = _mm256_or_si256(_mm256_slli_epi32::<16>(*x), words);
    *x = _mm256_blendv_epi8(*x, full, needs);
}

/// Writes the symbols of a block; returns a bit for each that is `escape`.
#[inline]
#[target_feature(enable = "avx2")]
fn store_symbols(
    halves: &[[__m256i; VECTORS]; 2],
    block: &mut [u8; BLOCK],
    escape: u8,
) -> [u64; 4] {
    let marker = _mm256_set1_epi8(escape as i8);
    let mut escapes = [0; 4];
    let (rows, _) = block.as_chunks_mut::<64>();
    for (i, row) in rows.iter_mut().enumerate() {
        // The runs of lanes 0, 1, 4, 5 and of lanes 2, 3, 6, 7.
        let a = _mm256_unpacklo_epi32(halves[0][i], halves[1][i]);
        let b = _mm256_unpackhi_epi32(halves[0][i], halves[1][i]);
        let first = _mm256_permute2x128_si256::<0x20>(a, b);
        let second = _mm256_permute2x128_si256::<0x31>(a, b);
        // SAFETY: two times 32 of the row's 64 bytes.
        unsafe {
            _mm256_storeu_si256(row.as_mut_ptr().cast(), first);
            _mm256_storeu_si256(row[32..].as_mut_ptr().cast(), second);
        }
        let mask = |v| u64::from(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, marker)) as u32);
        escapes[i] = mask(first) | mask(second) << 32;
    }
    escapes
}

/// Puts the symbols that follow a block in the places of its escapes.
#[cold]
fn take_escapes(
    states: &mut [u32; LANES],
    words: &mut &[[u8; 2]],
    escapes: [u64; 4],
    block: &mut [u8; BLOCK],
) -> Result<()> {
    let mut lanes = [0; LANES];
    for (lanes, row) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(escapes) {
        *lanes = row.to_le_bytes();
    }
    decode_escapes(states, words, lanes, block)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(states: &[u32; LANES]) -> [__m256i; VECTORS] {
    let (rows, _) = states.as_chunks::<WIDTH>();
    // SAFETY: each row has 32 readable bytes.
    let row = |i: usize| unsafe { _mm256_loadu_si256(rows[i].as_ptr().cast()) };
    [row(0), row(1), row(2), row(3)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(x: [__m256i; VECTORS], states: &mut [u32; LANES]) {
    for (row, x) in states.as_chunks_mut::<WIDTH>().0.iter_mut().zip(x) {
        // SAFETY: each row has 32 writable bytes.
        unsafe { _mm256_storeu_si256(row.as_mut_ptr().cast(), x) };
    }
}
