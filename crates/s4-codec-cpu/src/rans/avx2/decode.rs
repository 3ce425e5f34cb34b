//! Decoding.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::Result;

use super::super::pairs::{Blocks, Escapes, SegmentDecoder, Slots};
use super::super::stream::{BLOCK, RUN};
use super::super::table::MAX_TABLES;
use super::{VECTORS, WIDTH, load, store};

/// Bytes that the steps of one block may read: 64 for each refill of all lanes.
const BLOCK_AHEAD: usize = 64 * RUN;

/// For each set of lanes, the shuffle that gives each of its lanes a word, in order, and the others 0.
static SPREAD: Spread = Spread({
    let mut all = [[CLEAR; 4 * WIDTH]; 256];
    let mut set = 0usize;
    while set < 256 {
        let mut lane = 0;
        while lane < WIDTH {
            if set >> lane & 1 == 1 {
                let word = (set & ((1 << lane) - 1)).count_ones() as u8;
                all[set][4 * lane] = 2 * word;
                all[set][4 * lane + 1] = 2 * word + 1;
            }
            lane += 1;
        }
        set += 1;
    }
    all
});

/// For each byte of a lane, the shuffle that moves it to the lane's second byte and clears the others, for
/// half a register.
static TO_SECOND_BYTE: [[[u8; 4]; 4]; 4] = {
    let mut all = [[[CLEAR; 4]; 4]; 4];
    let mut i = 0;
    while i < 16 {
        all[i % 4][i / 4][1] = i as u8;
        i += 1;
    }
    all
};

/// The index for which a shuffle gives 0.
const CLEAR: u8 = 0x80;

#[repr(align(32))]
struct Spread([[u8; 4 * WIDTH]; 256]);

/// A decoder for tables of precision `P`.
pub(crate) struct Decoder<const P: i32>(Slots);

impl<const P: i32> Blocks for Decoder<P> {
    fn new(slots: Slots) -> Self {
        Self(slots)
    }

    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
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

impl<const P: i32> Decoder<P> {
    /// Decodes `blocks` blocks of each segment, with contexts if CONTEXTS is set.
    ///
    /// # Safety
    /// - The machine has AVX2, and the tables are of this `P`.
    /// - The words and the spare of each segment are valid; contexts are below the number of
    ///   tables.
    #[target_feature(enable = "avx2,popcnt,bmi1,bmi2")]
    unsafe fn blocks_of<const N: usize, const CONTEXTS: bool>(
        &self,
        mut segments: [&mut SegmentDecoder<'_>; N],
        blocks: usize,
    ) -> Result<()> {
        const { assert!(N <= 2 && VECTORS == 4, "only so much is unrolled below") };
        let escapes = self.0.escapes.as_ref();
        let marker = escapes.map_or(0, |escapes| escapes.markers[0]);
        // Without contexts all symbols are of the first table.
        let first_escapes = escapes.is_some_and(|escapes| escapes.present[0] != 0);
        let mut x: [_; N] = from_fn(|n| load(&segments[n].states));
        let mut runs = [[[_mm256_setzero_si256(); VECTORS]; 2]; N];
        let mut slots = [[[_mm256_setzero_si256(); VECTORS]; RUN]; N];
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
            for k in 0..RUN {
                // SAFETY: contexts are as for this function; each refill is one of the loads that
                // were ensured.
                unsafe {
                    unrolled!(S in [0 1] {
                        if S < N {
                            unrolled!(V in [0 1 2 3] {
                                let first = match CONTEXTS {
                                    true => first_slots::<P>(runs[S][k / 4][V], k % 4),
                                    false => _mm256_setzero_si256(),
                                };
                                slots[S][k][V] = self.step(&mut x[S][V], first);
                            });
                        }
                    });
                    if P != 8 || k % 2 == 1 {
                        unrolled!(S in [0 1] {
                            if S < N {
                                unrolled!(V in [0 1 2 3] { refill(&mut x[S][V], &mut next[S]) });
                            }
                        });
                    }
                }
            }
            let mut halves = [[[_mm256_setzero_si256(); VECTORS]; 2]; N];
            for n in 0..N {
                for half in 0..2 {
                    let rows = &slots[n][4 * half..][..4];
                    for v in 0..VECTORS {
                        halves[n][half][v] =
                            top_bytes(rows[0][v], rows[1][v], rows[2][v], rows[3][v]);
                    }
                }
            }
            for n in 0..N {
                let segment = &mut *segments[n];
                segment.words.next = next[n];
                segment.words.check()?;
                let block = segment.next_block()?;
                let of_one_table = store_symbols(&halves[n], block, marker);
                let Some(escapes) = escapes else { continue };
                let escapes = match CONTEXTS {
                    true => escaped(block, contexts[n], escapes),
                    false if first_escapes => of_one_table,
                    false => [0; 4],
                };
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

    /// One step of 8 lanes, given the first slots of their tables. Returns the slots, whose top bytes
    /// are the symbols.
    ///
    /// # Safety
    /// - The machine has AVX2, and the tables are of this `P`.
    /// - These are the first slots of tables.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn step(&self, x: &mut __m256i, first: __m256i) -> __m256i {
        let index = _mm256_and_si256(*x, _mm256_set1_epi32((1 << P) - 1));
        // SAFETY: every index is below the number of slots, as for this function.
        let slots = unsafe { look_up(&self.0.all, _mm256_add_epi32(first, index)) };
        let fields = _mm256_set1_epi32(0xfff);
        let freq = _mm256_and_si256(slots, fields);
        let bias = _mm256_and_si256(_mm256_srli_epi32::<12>(slots), fields);
        let whole = _mm256_srli_epi32::<P>(*x);
        *x = _mm256_add_epi32(_mm256_mullo_epi32(whole, freq), bias);
        if P == 12 {
            *x = _mm256_add_epi32(*x, whole);
        }
        slots
    }
}

/// The slots with these 8 indices. Each is loaded separately: the gather instruction is slow on AMD's processors,
/// and on Intel's that mitigate Downfall.
///
/// # Safety
/// - The machine has AVX2.
/// - Every index is below the number of slots.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn look_up(slots: &[u32], index: __m256i) -> __m256i {
    // SAFETY: as for this function.
    let slot = |i: u64| unsafe { _mm_cvtsi32_si128(*slots.get_unchecked(i as usize) as i32) };
    let two = |pair: i64| {
        let pair = pair as u64;
        _mm_unpacklo_epi32(slot(pair & 0xffff_ffff), slot(pair >> 32))
    };
    let four = |i| _mm_unpacklo_epi64(two(_mm_cvtsi128_si64(i)), two(_mm_extract_epi64::<1>(i)));
    let (low, high) = (_mm256_castsi256_si128(index), _mm256_extracti128_si256::<1>(index));
    _mm256_set_m128i(four(high), four(low))
}

/// The first slots of the tables whose indices are byte `k` of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn first_slots<const P: i32>(contexts: __m256i, k: usize) -> __m256i {
    // SAFETY: the pointer is to 16 readable bytes.
    let second = unsafe { _mm_loadu_si128(TO_SECOND_BYTE[k].as_ptr().cast()) };
    let times_256 = _mm256_shuffle_epi8(contexts, _mm256_broadcastsi128_si256(second));
    if P == 8 { times_256 } else { _mm256_slli_epi32::<4>(times_256) }
}

/// The contexts of a block: the first four of each lane, and the other four.
#[inline]
#[target_feature(enable = "avx2")]
fn unzipped(contexts: &[u8; BLOCK]) -> [[__m256i; VECTORS]; 2] {
    let (rows, _) = contexts.as_chunks::<32>();
    let mut halves = [[_mm256_setzero_si256(); VECTORS]; 2];
    for v in 0..VECTORS {
        // SAFETY: each row has 32 readable bytes.
        let row = |i: usize| unsafe {
            _mm256_castsi256_ps(_mm256_loadu_si256(rows[2 * v + i].as_ptr().cast()))
        };
        let in_order = |v| _mm256_permute4x64_epi64::<0xd8>(_mm256_castps_si256(v));
        // The shuffles give lanes 0, 1, 4, 5, 2, 3, 6, 7.
        halves[0][v] = in_order(_mm256_shuffle_ps::<0x88>(row(0), row(1)));
        halves[1][v] = in_order(_mm256_shuffle_ps::<0xdd>(row(0), row(1)));
    }
    halves
}

/// Gives a word to every lane whose state is below 2^16.
///
/// # Safety
/// - The 16 bytes at `next` may be read.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn refill(x: &mut __m256i, next: &mut *const u8) {
    let needs = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(*x), _mm256_setzero_si256());
    let set = _mm256_movemask_ps(_mm256_castsi256_ps(needs)) as usize;
    // SAFETY: `SPREAD` has 32 bytes for each set; the words may be read as for this function, and at
    // most 8 are taken.
    let (spread, words) = unsafe {
        let spread = _mm256_load_si256(SPREAD.0[set].as_ptr().cast());
        let words = _mm_loadu_si128(next.cast());
        *next = next.add(2 * set.count_ones() as usize);
        (spread, _mm256_broadcastsi128_si256(words))
    };
    let words = _mm256_shuffle_epi8(words, spread);
    let full = _mm256_or_si256(_mm256_slli_epi32::<16>(*x), words);
    *x = _mm256_blendv_epi8(*x, full, needs);
}

/// The top bytes of the lanes of four registers, those of the first one lowest.
#[inline]
#[target_feature(enable = "avx2")]
fn top_bytes(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> __m256i {
    let top = _mm256_set1_epi32(-1 << 24);
    let push = |x, next| _mm256_blendv_epi8(_mm256_srli_epi32::<8>(x), next, top);
    push(push(push(a, b), c), d)
}

/// Writes the symbols of a block; returns a bit for each that is `marker`.
#[inline]
#[target_feature(enable = "avx2")]
fn store_symbols(
    halves: &[[__m256i; VECTORS]; 2],
    block: &mut [u8; BLOCK],
    marker: u8,
) -> [u64; 4] {
    let marker = _mm256_set1_epi8(marker as i8);
    let mut found = [0; 4];
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
        let bits = |v| u64::from(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, marker)) as u32);
        found[i] = bits(first) | bits(second) << 32;
    }
    found
}

/// A bit for each symbol of a block that marks an escape.
#[inline]
#[target_feature(enable = "avx2")]
fn escaped(block: &[u8; BLOCK], contexts: &[u8; BLOCK], escapes: &Escapes) -> [u64; 4] {
    const { assert!(MAX_TABLES == 16) };
    // SAFETY: the pointer is to 16 readable bytes.
    let table = |bytes: &[u8; 16]| unsafe {
        _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()))
    };
    // SAFETY: the pointer is to 32 readable bytes.
    let row = |bytes: &[u8; 32]| unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    let (markers, present) = (table(&escapes.markers), table(&escapes.present));
    let (symbols, contexts) = (block.as_chunks::<32>().0, contexts.as_chunks::<32>().0);
    let mut found = [0; 4];
    for i in 0..BLOCK / 32 {
        let contexts = row(&contexts[i]);
        let alike = _mm256_cmpeq_epi8(row(&symbols[i]), _mm256_shuffle_epi8(markers, contexts));
        let alike = _mm256_and_si256(alike, _mm256_shuffle_epi8(present, contexts));
        found[i / 2] |= u64::from(_mm256_movemask_epi8(alike) as u32) << (32 * (i % 2));
    }
    found
}
