//! Rank-1 prediction: round trips by ranges, what is predicted, and hostile side data.

use proptest::prelude::*;
use s4_format::Error;
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};
use s4_predict::rank1::{self, Offsets};

const WIDTHS: [Width; 4] = [Width::B1, Width::B2, Width::B4, Width::B8];

/// Floats that are the product of a factor of their row and one of their column, but for noise.
fn squares(rows: u32, cols: u32) -> Vec<u8> {
    let factor = |i: u32| f64::from(i * 7919 % 101 + 1).powi(-3);
    let mut bytes = Vec::new();
    for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
        let noise = 1.0 + f64::from((r * 31 + c * 17) % 13) / 100.0;
        let x = (factor(r) * factor(c + 5) * noise) as f32;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes
}

/// Replaces float bits, those of elements from `start` on, by their differences from the prediction.
fn forward(
    offsets: &Offsets<'_>,
    kernels: Kernels,
    start: u64,
    buf: &mut [u8],
) -> s4_format::Result<()> {
    let (width, mut predicted) = (offsets.width(), vec![0x5a; buf.len()]);
    offsets.predict_range(kernels, start, &mut predicted)?;
    // What is predicted by vectors is what is predicted one by one.
    for (i, bits) in predicted.chunks(width.bytes()).enumerate() {
        let mut ordered = bits.to_vec();
        kernels.to_ordered(width, &mut ordered);
        ordered.resize(8, 0);
        let at = start as usize + i;
        let expected = offsets.predict(at / offsets.cols(), at % offsets.cols());
        assert_eq!(expected, Some(u64::from_le_bytes(ordered.try_into().expect("8 bytes"))));
    }
    kernels.sub_values(width, buf, &predicted);
    Ok(())
}

/// Undoes [`forward`].
fn inverse(
    offsets: &Offsets<'_>,
    kernels: Kernels,
    start: u64,
    buf: &mut [u8],
) -> s4_format::Result<()> {
    let mut predicted = vec![0xa5; buf.len()];
    offsets.predict_range(kernels, start, &mut predicted)?;
    kernels.add_values(offsets.width(), buf, &predicted);
    Ok(())
}

/// Forward and back in ranges of `step` elements; returns the residuals.
fn check(width: Width, side: &[u8], src: &[u8], step: usize) -> Vec<u8> {
    let rank1 = Offsets::parse(width, side).expect("side data of a fit");
    let mut all = Vec::new();
    for simd in Simd::available() {
        let kernels = Kernels::new(simd);
        let mut buf = src.to_vec();
        let ranges = |buf: &mut [u8], f: &dyn Fn(u64, &mut [u8])| {
            for (i, part) in buf.chunks_mut(step * width.bytes()).enumerate() {
                f((i * step) as u64, part);
            }
        };
        ranges(&mut buf, &|at, part| forward(&rank1, kernels, at, part).expect("a valid range"));
        all.push(buf.clone());
        ranges(&mut buf, &|at, part| inverse(&rank1, kernels, at, part).expect("a valid range"));
        assert!(buf == src, "{width:?} {simd} in ranges of {step}");
    }
    assert!(all.iter().all(|residuals| *residuals == all[0]));
    all.swap_remove(0)
}

#[test]
fn products_of_rows_and_columns_leave_little() {
    let (rows, cols) = (37, 53);
    let src = squares(rows, cols);
    let side = rank1::fit(Width::B4, rows, cols, &src).unwrap();
    let residuals = check(Width::B4, &side, &src, (rows * cols) as usize);
    let bits = |u: u32| u32::BITS - u.leading_zeros();
    let size = |bytes: &[u8]| -> u32 {
        bytes.as_chunks().0.iter().map(|b| bits(u32::from_le_bytes(*b))).sum()
    };
    // Values span 12 binades; residuals stay within a fraction of one.
    let per_element = size(&residuals) / (rows * cols);
    assert!(per_element <= 21, "{per_element} bits");
    assert!(size(&src) / (rows * cols) >= 29);
}

#[test]
fn every_range_gives_the_same_residuals() {
    let (rows, cols) = (11, 13);
    let src = squares(rows, cols);
    let side = rank1::fit(Width::B4, rows, cols, &src).unwrap();
    let whole = check(Width::B4, &side, &src, 143);
    for step in [1, 2, 12, 13, 14, 26, 100] {
        assert_eq!(check(Width::B4, &side, &src, step), whole);
    }
    let rank1 = Offsets::parse(Width::B4, &side).unwrap();
    for start in 0..=143 {
        for end in start..=143 {
            let mut part = src[start * 4..end * 4].to_vec();
            forward(&rank1, Kernels::default(), start as u64, &mut part).unwrap();
            assert_eq!(part, whole[start * 4..end * 4]);
        }
    }
}

#[test]
fn every_pattern_of_every_width_and_shape() {
    for width in WIDTHS {
        let floats = Kind::FLOATS.into_iter().filter(|k| k.width == width);
        for kind in floats.chain([Kind::int(width)]) {
            for (rows, cols) in [(1, 1), (1, 120), (120, 1), (8, 15), (3, 40)] {
                for (_, src) in patterns::all(kind, 120) {
                    let src = &src[..(rows * cols) as usize * width.bytes()];
                    let side = rank1::fit(width, rows, cols, src).unwrap();
                    check(width, &side, src, 50);
                }
            }
        }
    }
}

#[test]
fn offsets_are_the_rounded_means() {
    // Ordered integers: 10 20 | 31 40 (means 15 and 35.5, halves up), then columns -5 and 4.5.
    let src = [10_u16, 20, 31, 40].map(u16::to_le_bytes).concat();
    let side = rank1::fit(Width::B2, 2, 2, &src).unwrap();
    let offsets = [15_i16, 36, -5, 5].map(i16::to_le_bytes).concat();
    assert_eq!(side, [&[2, 0, 0, 0, 2, 0, 0, 0], &offsets[..]].concat());
    let rank1 = Offsets::parse(Width::B2, &side).unwrap();
    assert_eq!(rank1.predict(0, 0), Some(10));
    assert_eq!(rank1.predict(1, 1), Some(41));
    assert_eq!((rank1.predict(2, 0), rank1.predict(0, 2)), (None, None));
    assert_eq!(rank1.predict(usize::MAX, 0), None);

    // -1.0 and -1.0: below zero the ordered integer is the inverse of the magnitude.
    let src = [0xbf80_u16; 2].map(u16::to_le_bytes).concat();
    let side = rank1::fit(Width::B2, 1, 2, &src).unwrap();
    let rank1 = Offsets::parse(Width::B2, &side).unwrap();
    assert_eq!(rank1.predict(0, 1), Some(!0x3f80 & 0xffff));
}

#[test]
fn extremes_do_not_overflow() {
    for width in WIDTHS {
        let (most, least) = (i64::MAX >> (64 - width.bits()), i64::MIN >> (64 - width.bits()));
        // Float bits of the extremes of the ordered integers.
        let values = [most, least ^ most, most, most, least ^ most, least ^ most];
        let src: Vec<u8> =
            values.iter().flat_map(|x| x.to_le_bytes()[..width.bytes()].to_vec()).collect();
        for (rows, cols) in [(2, 3), (3, 2), (6, 1), (1, 6)] {
            let side = rank1::fit(width, rows, cols, &src).unwrap();
            check(width, &side, &src, 4);
        }
    }
}

#[test]
fn hostile_side_data_is_refused() {
    let src = squares(4, 5);
    let side = rank1::fit(Width::B4, 4, 5, &src).unwrap();
    for cut in 0..side.len() {
        let error = Offsets::parse(Width::B4, &side[..cut]).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. }), "{cut}: {error}");
    }
    let longer = [&side[..], &[0]].concat();
    assert!(matches!(Offsets::parse(Width::B4, &longer), Err(Error::Corrupt { .. })));
    assert!(matches!(Offsets::parse(Width::B2, &side), Err(Error::Corrupt { .. })));
    assert!(matches!(Offsets::parse(Width::B8, &side), Err(Error::Truncated { .. })));
    for (at, sides) in [(0, 0_u32), (4, 0), (0, 1 << 31), (4, u32::MAX)] {
        let mut bad = side.clone();
        bad[at..at + 4].copy_from_slice(&sides.to_le_bytes());
        assert!(matches!(Offsets::parse(Width::B4, &bad), Err(Error::Corrupt { .. })));
    }
}

#[test]
fn ranges_outside_of_the_region_are_refused() {
    let src = squares(4, 5);
    let side = rank1::fit(Width::B4, 4, 5, &src).unwrap();
    let rank1 = Offsets::parse(Width::B4, &side).unwrap();
    let kernels = Kernels::default();
    for (start, len) in [(0, 84), (1, 80), (20, 4), (21, 0), (u64::MAX, 4), (0, 3)] {
        let mut buf = vec![0x77; len];
        let error = rank1.predict_range(kernels, start, &mut buf).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(inverse(&rank1, kernels, start, &mut buf).is_err());
        assert!(buf.iter().all(|b| *b == 0x77), "touched");
    }
    assert!(forward(&rank1, kernels, 20, &mut []).is_ok());
}

#[test]
fn regions_that_are_none_are_not_fitted() {
    for (rows, cols, len) in [(0, 5, 0), (5, 0, 0), (2, 3, 23), (u32::MAX, u32::MAX, 4)] {
        let error = rank1::fit(Width::B4, rows, cols, &vec![0; len]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn any_side_data_is_data_or_an_error(
        rows in 0..9_u32,
        cols in 0..9_u32,
        offsets in prop::collection::vec(any::<u8>(), 0..140),
        start in 0..80_u64,
        src in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let side = [&rows.to_le_bytes(), &cols.to_le_bytes(), &offsets[..]].concat();
        for width in WIDTHS {
            // As given, and cut to the size that the header says.
            let need = 8 + (rows + cols) as usize * width.bytes();
            for side in [&side[..], &side[..need.min(side.len())]] {
                let Ok(rank1) = Offsets::parse(width, side) else { continue };
                let mut buf = src.clone();
                if forward(&rank1, Kernels::default(), start, &mut buf).is_ok() {
                    inverse(&rank1, Kernels::default(), start, &mut buf).unwrap();
                }
                prop_assert_eq!(&buf, &src);
            }
        }
    }
}
