//! The layout `token`: round trips, worked examples, and streams that no split has written.

use proptest::prelude::*;
use s4_format::Error;
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width, token_bits, token_bound};

const WIDTHS: [Width; 4] = [Width::B1, Width::B2, Width::B4, Width::B8];

/// Splits with every set of instructions, which must agree.
fn split(width: Width, src: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let n = src.len() / width.bytes();
    let mut all = Simd::available().map(|simd| {
        let (mut tokens, mut bits) = (vec![0xaa; n], vec![0xaa; token_bound(width, n)]);
        let len = Kernels::new(simd).split_token(width, src, &mut tokens, &mut bits);
        bits.truncate(len);
        (tokens, bits)
    });
    let scalar = all.next().expect("the scalar kernels");
    assert!(all.all(|other| other == scalar), "{width:?}: sets differ");
    scalar
}

/// Merges with every set of instructions, which must agree.
fn merge(width: Width, tokens: &[u8], bits: &[u8]) -> Result<Vec<u8>, Error> {
    let mut all = Simd::available().map(|simd| {
        let mut dst = vec![0x55; tokens.len() * width.bytes()];
        Kernels::new(simd).merge_token(width, tokens, bits, &mut dst)?;
        Ok(dst)
    });
    let scalar = all.next().expect("the scalar kernels");
    assert!(all.all(|other| other == scalar), "{width:?}: sets differ");
    scalar
}

fn check(width: Width, src: &[u8], case: &str) {
    let (tokens, bits) = split(width, src);
    let total: u32 = tokens.iter().map(|t| token_bits(width, *t).expect("a valid token")).sum();
    assert_eq!(bits.len(), total.div_ceil(8) as usize, "{width:?} {case}");
    assert_eq!(merge(width, &tokens, &bits).expect("a stream of split"), src, "{width:?} {case}");
}

#[test]
fn every_pattern_at_every_size() {
    for width in WIDTHS {
        for (name, bytes) in patterns::all(Kind::int(width), 130) {
            for n in 0..=130 {
                check(width, &bytes[..n * width.bytes()], &format!("{name} of {n}"));
            }
        }
    }
}

#[test]
fn every_element_of_one_and_two_bytes() {
    check(Width::B1, &(0..=u8::MAX).collect::<Vec<_>>(), "all");
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    check(Width::B2, &all, "all");
}

#[test]
fn worked_example() {
    // Magnitudes 0, 0, 1, 5 and 0b1_1011_0110, with signs 0, 1, 1, 0 and 1; three top bits.
    let src = [0, 1, 3, 10, 0x36d].map(u16::to_le_bytes).concat();
    let (tokens, bits) = split(Width::B2, &src);
    let five = 2 * (1 + (2 << 3 | 0b010));
    let large = 2 * (1 + (8 << 3 | 0b101)) + 1;
    assert_eq!(tokens, [0, 1, 3, five, large]);
    assert_eq!(bits, [0b1_0110]);
    assert_eq!(token_bits(Width::B2, large), Some(5));
}

#[test]
fn every_token_is_valid_exactly_if_an_element_has_it() {
    let mut seen = [false; 256];
    for u in 0..=u16::MAX {
        seen[usize::from(split(Width::B2, &u.to_le_bytes()).0[0])] = true;
    }
    for (token, seen) in (0..=u8::MAX).zip(seen) {
        assert_eq!(token_bits(Width::B2, token).is_some(), seen, "token {token}");
    }
    // The largest magnitude has the largest token.
    for (width, largest) in WIDTHS.into_iter().zip([225, 241, 249, 253]) {
        assert_eq!(split(width, &vec![0xff; width.bytes()]).0, [largest]);
        assert_eq!(token_bits(width, largest + 1), None);
    }
}

#[test]
fn bound_is_reached_and_never_passed() {
    for width in WIDTHS {
        for n in [0, 1, 7, 8, 9, 1000] {
            let (_, bits) = split(width, &vec![0xff; n * width.bytes()]);
            assert_eq!(bits.len(), token_bound(width, n), "{width:?} {n}");
        }
    }
}

#[test]
fn streams_of_the_wrong_size_or_with_stray_bits_are_refused() {
    for width in WIDTHS {
        let (tokens, bits) = split(width, &vec![0xff; 3 * width.bytes()]);
        for cut in 0..bits.len() {
            let error = merge(width, &tokens, &bits[..cut]).unwrap_err();
            assert!(matches!(error, Error::Truncated { .. }), "{error}");
        }
        let longer = [&bits[..], &[0]].concat();
        assert!(matches!(merge(width, &tokens, &longer), Err(Error::Corrupt { .. })));
        // 3 elements of 2, 11, 28 or 61 bits leave bits unused.
        let mut stray = bits.clone();
        *stray.last_mut().unwrap() |= 0x80;
        let error = merge(width, &tokens, &stray).unwrap_err();
        assert!(error.to_string().contains("not zero"), "{error}");
        assert!(merge(width, &[255, 0, 0], &bits).unwrap_err().to_string().contains("token"));
    }
}

proptest! {
    #[test]
    fn any_elements(bytes in prop::collection::vec(any::<u8>(), 0..4000), small in 0..64_u32) {
        for width in WIDTHS {
            let n = bytes.len() / width.bytes();
            check(width, &bytes[..n * width.bytes()], "random");
            // Shifted, so that magnitudes of every size are equally likely.
            let mut src = bytes[..n * width.bytes()].to_vec();
            for (i, element) in src.chunks_mut(width.bytes()).enumerate() {
                let mut u = [0; 8];
                u[..width.bytes()].copy_from_slice(element);
                let shift = (small + i as u32) % width.bits();
                let u = u64::from_le_bytes(u) >> shift;
                element.copy_from_slice(&u.to_le_bytes()[..width.bytes()]);
            }
            check(width, &src, "random sizes");
        }
    }

    #[test]
    fn any_streams(
        tokens in prop::collection::vec(any::<u8>(), 0..300),
        bits in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        for width in WIDTHS {
            // Only what a split writes is accepted.
            if let Ok(elements) = merge(width, &tokens, &bits) {
                prop_assert_eq!(split(width, &elements), (tokens.clone(), bits.clone()));
            }
            // With valid tokens and the right size, all but the stray bits decode.
            let valid: Vec<u8> =
                tokens.iter().copied().filter(|t| token_bits(width, *t).is_some()).collect();
            let total: usize =
                valid.iter().filter_map(|t| token_bits(width, *t)).map(|b| b as usize).sum();
            let mut stream: Vec<u8> = bits.iter().copied().cycle().take(total.div_ceil(8)).collect();
            if stream.len() == total.div_ceil(8) {
                if !total.is_multiple_of(8) && let Some(last) = stream.last_mut() {
                    *last &= (1 << (total % 8)) - 1;
                }
                let elements = merge(width, &valid, &stream).unwrap();
                prop_assert_eq!(split(width, &elements), (valid, stream));
            }
        }
    }
}
