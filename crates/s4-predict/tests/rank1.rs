//! Prediction by rows and columns: round trips by ranges, what is predicted, and hostile side data.

mod common;

use common::{example, predicted, side, word};
use proptest::prelude::*;
use s4_format::Error;
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};
use s4_predict::rank1::{self, Grid, Offsets};

const WIDTHS: [Width; 3] = [Width::B2, Width::B4, Width::B8];

/// Floats that are the product of a row's and a column's factor, with some noise.
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

/// The offsets of a whole tensor.
fn fit(width: Width, rows: u32, cols: u32, src: &[u8]) -> Vec<u8> {
    let grid = Grid::of(&[rows.into(), cols.into()]).expect("a grid");
    let values = grid.ranges().flat_map(|r| {
        src[r.start as usize * width.bytes()..r.end as usize * width.bytes()].iter().copied()
    });
    rank1::fit(width, &grid, &values.collect::<Vec<_>>()).expect("offsets")
}

/// The predicted bits of value `i` and the residual of the bits `x`, as specified.
fn specified(width: Width, side: &[u8], i: usize, x: u64) -> (u64, u64) {
    let predicted = predicted(width.bits(), side, i, 0);
    let n = width.bits() - 1;
    let modulus = 1i128 << n;
    let mut d = (i128::from(x) % modulus - i128::from(predicted)).rem_euclid(modulus);
    if d >= modulus / 2 {
        d -= modulus;
    }
    let zigzag = if d < 0 { -2 * d - 1 } else { 2 * d };
    (predicted, x >> n << n | zigzag as u64)
}

/// Predicts in ranges of `step` values, and compares with the specification. Returns the residuals.
fn check(width: Width, side: &[u8], src: &[u8], step: usize) -> Vec<u8> {
    let offsets = Offsets::parse(width, side).expect("side data of a fit");
    let bytes = width.bytes();
    let (mut predicted, mut residuals) = (vec![], vec![]);
    for (i, x) in src.chunks(bytes).enumerate() {
        let (p, u) = specified(width, side, i, word(x));
        predicted.extend_from_slice(&p.to_le_bytes()[..bytes]);
        residuals.extend_from_slice(&u.to_le_bytes()[..bytes]);
    }
    for simd in Simd::available() {
        let kernels = Kernels::new(simd);
        let mut out = vec![0x5a; src.len()];
        for (i, part) in out.chunks_mut(step * bytes).enumerate() {
            offsets.predict_range(kernels, (i * step) as u64, &[], part).expect("a valid range");
        }
        assert!(out == predicted, "{width:?} {simd} in ranges of {step}");
        let mut buf = src.to_vec();
        kernels.sub_magnitudes(width, &mut buf, &out);
        assert!(buf == residuals, "{width:?} {simd}");
        kernels.add_magnitudes(width, &mut buf, &out);
        assert!(buf == src, "{width:?} {simd}");
    }
    residuals
}

#[test]
fn products_of_rows_and_columns_leave_little() {
    for (rows, cols) in [(37, 53), (700, 500)] {
        let src = squares(rows, cols);
        let side = fit(Width::B4, rows, cols, &src);
        let residuals = check(Width::B4, &side, &src, (rows * cols) as usize);
        let bits = |u: u32| u64::from(u32::BITS - u.leading_zeros());
        let size = |bytes: &[u8]| -> u64 {
            bytes.as_chunks().0.iter().map(|b| bits(u32::from_le_bytes(*b))).sum()
        };
        // Values span 12 binades; residuals stay within a fraction of one.
        let per_value = size(&residuals) / u64::from(rows * cols);
        assert!(per_value <= 21, "{per_value} bits of {rows} x {cols}");
        assert!(size(&src) / u64::from(rows * cols) >= 29);
    }
}

#[test]
fn columns_that_differ_more_than_rows_are_told_from_these() {
    // The parts of the columns differ, and each row shows only one of them: only whole rows tell by
    // how much.
    let (rows, cols) = (384u32, 768u32);
    let mut src = vec![];
    for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
        let x = 2f32.powi((c / 128 * 5 % 7) as i32) * (1.0 + (r % 5) as f32 / 4.0);
        src.extend_from_slice(&(1e-12 * x).to_le_bytes());
    }
    let side = fit(Width::B4, rows, cols, &src);
    let residuals = check(Width::B4, &side, &src, 4096);
    let top = residuals.as_chunks::<4>().0.iter().map(|u| u32::from_le_bytes(*u) >> 23);
    assert!(top.max() <= Some(1), "half an octave at most, where values span seven");
}

#[test]
fn rows_of_zeros_stay_zeros_and_do_not_spoil_the_others() {
    let (rows, cols) = (64u32, 48u32);
    let all = squares(rows, cols);
    let mut some = all.clone();
    for row in some.chunks_mut(4 * cols as usize).step_by(3) {
        row.fill(0);
    }
    let (all, some) = (
        check(Width::B4, &fit(Width::B4, rows, cols, &all), &all, 100),
        check(Width::B4, &fit(Width::B4, rows, cols, &some), &some, 100),
    );
    let top = |r: &[u8]| r.as_chunks::<4>().0.iter().map(|u| u64::from(u[3])).sum::<u64>();
    for (i, (all, some)) in
        all.chunks(4 * cols as usize).zip(some.chunks(4 * cols as usize)).enumerate()
    {
        match i % 3 {
            0 => assert!(some.iter().all(|b| *b == 0), "row {i}"),
            _ => assert!(top(some) <= top(all) + 2, "row {i}"),
        }
    }
}

#[test]
fn every_range_gives_the_same_prediction() {
    let (rows, cols) = (17, 19);
    let src = squares(rows, cols);
    let side = fit(Width::B4, rows, cols, &src);
    for step in [1, 2, 18, 19, 20, 38, 100, 323] {
        check(Width::B4, &side, &src, step);
    }
}

#[test]
fn every_pattern_of_every_width_and_shape() {
    for width in WIDTHS {
        let floats = Kind::FLOATS.into_iter().filter(|k| k.width == width);
        for kind in floats.chain([Kind::int(width)]) {
            for (rows, cols) in [(16, 16), (16, 40), (40, 16)] {
                for (_, src) in patterns::all(kind, 640) {
                    let src = &src[..(rows * cols) as usize * width.bytes()];
                    check(width, &fit(width, rows, cols, src), src, 50);
                }
            }
        }
    }
}

#[test]
fn the_example_of_the_specification() {
    let side = side(&[-16, i16::MIN], &[0, 512, 1], (0x3f80_0000, 14, 0));
    let bytes = example(include_str!("../../../docs/predictors/rank1.md"));
    assert_eq!(bytes, side);
    let src = [0x3f80_0000, 0xbff8_0000, 0x3f7c_4000u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    let residuals = [0x0008_0000, 0x8007_ffff, 0, 0, 0, 0u32].map(u32::to_le_bytes).concat();
    assert_eq!(check(Width::B4, &side, &src, 4), residuals);
}

#[test]
fn extremes_wrap() {
    for width in WIDTHS {
        let most = u64::MAX >> (65 - width.bits());
        let src: Vec<u8> = [0, 1, most, most + 1, u64::MAX, most - 1]
            .iter()
            .flat_map(|x| x.to_le_bytes()[..width.bytes()].to_vec())
            .collect();
        for (base, shift) in [(0, 0), (most, 0), (most, width.bits() as u8 - 1), (1, 9)] {
            let rows = [i16::MIN, i16::MIN + 1, i16::MAX];
            check(width, &side(&rows, &[i16::MIN, i16::MAX], (base, shift, 0)), &src, 4);
        }
    }
}

#[test]
fn shapes_are_cut_where_offsets_are_fewest() {
    let bytes = |shape: &[u64]| Grid::of(shape).map(|g| g.offset_bytes());
    assert_eq!(bytes(&[768, 3072]), Some(2 * 3840));
    assert_eq!(bytes(&[64, 64, 3, 3]), Some(2 * (64 + 576)));
    assert_eq!(bytes(&[8, 100, 90]), Some(2 * 890));
    for none in [&[][..], &[5000], &[5000, 2], &[1, 5000], &[0, 64], &[1 << 40, 1 << 40]] {
        assert_eq!(bytes(none), None, "{none:?}");
    }
}

#[test]
fn offsets_are_made_from_a_small_part_of_what_is_large() {
    for shape in [[151_936, 896], [262_144, 14_336], [500_000, 512], [2 << 20, 4096], [4096, 4096]]
    {
        let grid = Grid::of(&shape).unwrap();
        let values: u64 = grid.ranges().take(shape[0] as usize).map(|r| r.end - r.start).sum();
        assert!(values <= (1 << 24).max(shape[0] * shape[1] / 8), "{shape:?}: {values}");
    }
    // Every value would be needed.
    for none in [[8_000_000, 64], [64, 8_000_000], [34_000_000, 16], [10_000_000, 128]] {
        assert_eq!(Grid::of(&none), None, "{none:?}");
    }
    // Offsets are side data, of which a tensor may have 64 MiB, with its shared tables.
    let rows = (63 << 20) / 2 - 4096;
    assert!(Grid::of(&[rows, 4096]).is_some());
    assert_eq!(Grid::of(&[rows + 1, 4096]), None);
}

#[test]
fn grids_cover_every_row_and_column() {
    for (rows, cols) in [(16, 16), (5000, 70), (600, 900), (16, 100_000), (100_000, 16)] {
        let grid = Grid::of(&[rows, cols]).unwrap();
        let mut seen = vec![0u32; cols as usize];
        let (mut next, mut values) = (0, 0);
        for (row, range) in (0..rows).zip(grid.ranges()) {
            assert!(range.start >= next && range.end <= (row + 1) * cols, "in order, in their row");
            assert!(range.start >= row * cols && !range.is_empty());
            (range.start..range.end).for_each(|i| seen[(i % cols) as usize] += 1);
            (next, values) = (range.end, values + range.end - range.start);
        }
        let whole = grid.ranges().skip(rows as usize);
        assert!(whole.clone().all(|r| r.start % cols == 0 && r.end - r.start == cols));
        assert!([0, 8].contains(&whole.count()), "none if all of each row was looked at");
        assert!(seen.iter().all(|n| u64::from(*n) >= rows.min(50)), "{rows} x {cols}");
        assert!(values <= (rows * cols / 2).max(1 << 18) || cols.min(rows) < 129);
    }
}

#[test]
fn hostile_side_data_is_refused() {
    let good = side(&[1, 2, 3, 4], &[5, 6, 7, 8, 9], (100, 14, 0));
    assert!(Offsets::parse(Width::B4, &good).is_ok());
    for cut in 0..good.len() {
        let error = Offsets::parse(Width::B4, &good[..cut]).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. }), "{cut}: {error}");
    }
    let longer = [&good[..], &[0]].concat();
    assert!(matches!(Offsets::parse(Width::B4, &longer), Err(Error::Corrupt { .. })));
    let changed = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    for bad in [
        changed(0, &0u32.to_le_bytes()),
        changed(4, &0u32.to_le_bytes()),
        changed(0, &(1u32 << 31).to_le_bytes()),
        changed(4, &u32::MAX.to_le_bytes()),
        changed(8, &(1u64 << 31).to_le_bytes()),
        changed(16, &[32]),
        changed(18, &[1]),
        changed(23, &[1]),
    ] {
        assert!(matches!(Offsets::parse(Width::B4, &bad), Err(Error::Corrupt { .. })), "{bad:?}");
    }
}

#[test]
fn ranges_outside_of_the_tensor_are_refused() {
    let side = side(&[1, 2, 3, 4], &[5, 6, 7, 8, 9], (100, 14, 0));
    let offsets = Offsets::parse(Width::B4, &side).unwrap();
    for (start, len) in [(0, 84), (1, 80), (20, 4), (21, 0), (u64::MAX, 4), (0, 3)] {
        let mut buf = vec![0x77; len];
        let error = offsets.predict_range(Kernels::default(), start, &[], &mut buf).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(buf.iter().all(|b| *b == 0x77), "touched");
    }
    assert!(offsets.predict_range(Kernels::default(), 20, &[], &mut []).is_ok());
}

#[test]
fn a_fit_of_another_number_of_values_is_refused() {
    let grid = Grid::of(&[16, 16]).unwrap();
    for len in [0, 4 * 256 - 1, 4 * 256 + 4] {
        let error = rank1::fit(Width::B4, &grid, &vec![0; len]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn any_side_data_is_data_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        rows in prop::collection::vec(any::<i16>(), 1..9),
        cols in prop::collection::vec(any::<i16>(), 1..9),
        base in any::<u64>(),
        shift in 0..64u8,
        src in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        for width in WIDTHS {
            let _ = Offsets::parse(width, &bytes);
            let base = base >> (65 - width.bits());
            let side = side(&rows, &cols, (base, shift % width.bits() as u8, 0));
            let values = src.len() / width.bytes();
            let n = values.min(rows.len() * cols.len());
            check(width, &side, &src[..n * width.bytes()], 7);
        }
    }

    #[test]
    fn any_values_give_offsets(
        rows in 16..40u32,
        cols in 16..40u32,
        seed in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        for width in WIDTHS {
            let len = (rows * cols) as usize * width.bytes();
            let src: Vec<u8> = seed.iter().copied().cycle().take(len).collect();
            check(width, &fit(width, rows, cols, &src), &src, 64);
        }
    }
}
