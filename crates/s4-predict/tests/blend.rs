//! Rows, columns and a share of the parent: what is predicted, how the offsets are made, and hostile side data.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{example, predicted, side, word};
use s4_format::side::{Side, SideKind};
use s4_format::{DType, Error};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};
use s4_predict::rank1::{self, Expected, Grid, Offsets};
use s4_predict::{Blend, Predict, Predicted, Rank1, Tensor};

fn dtype_of(width: Width) -> DType {
    match width {
        Width::B2 => DType::BFloat16,
        Width::B4 => DType::Float32,
        _ => DType::Float64,
    }
}

#[test]
fn every_pattern_of_parents_is_predicted_as_specified() {
    let (rows, cols) = (7usize, 23usize);
    for width in [Width::B2, Width::B4, Width::B8] {
        let offset = |i: usize| (i * 7919 % 65536) as u16 as i16;
        let mut row_offsets: Vec<i16> = (0..rows).map(offset).collect();
        row_offsets[3] = i16::MIN;
        let col_offsets: Vec<i16> = (100..100 + cols).map(offset).collect();
        let most = u64::MAX >> (65 - width.bits());
        for numbers in [(0, 0, 1), (most, 9, 255), (most / 3, width.bits() as u8 - 1, 128)] {
            let bytes = side(&row_offsets, &col_offsets, numbers);
            let mut data = Side::default();
            data.push(SideKind::OFFSETS, bytes.clone()).unwrap();
            let shape = [rows as u64, cols as u64];
            let tensor = Tensor { dtype: dtype_of(width), shape: &shape, side: &data };
            for (name, parent) in patterns::all(Kind::int(width), rows * cols) {
                let values = parent.chunks(width.bytes()).enumerate();
                let expected: Vec<u8> = values
                    .flat_map(|(i, p)| {
                        predicted(width.bits(), &bytes, i, word(p)).to_le_bytes()[..width.bytes()]
                            .to_vec()
                    })
                    .collect();
                for (simd, step) in Simd::available().zip([5, 23, 40, 161]) {
                    let mut out = vec![0x5a; parent.len()];
                    let size = step * width.bytes();
                    for (i, (out, parent)) in
                        out.chunks_mut(size).zip(parent.chunks(size)).enumerate()
                    {
                        let kernels = Kernels::new(simd);
                        let first = (i * step) as u64;
                        let outcome = Blend.predict(kernels, &tensor, first, &[parent], out);
                        assert_eq!(outcome, Ok(Predicted::Written));
                    }
                    assert!(out == expected, "{width:?} {name} {numbers:?} {simd} {step}");
                }
            }
        }
    }
}

#[test]
fn the_example_of_the_specification() {
    let bytes = example(include_str!("../../../docs/predictors/blend.md"));
    assert_eq!(bytes, side(&[-16, i16::MIN], &[0, 512], (0x1fc0_0000, 14, 128)));
    let parent = [0x3f80_0000u32, 0xbf80_0003, 0x3f80_0000, 0].map(u32::to_le_bytes).concat();
    let expected = [0x3f7c_0000u32, 0x3ffc_0001, 0, 0].map(u32::to_le_bytes).concat();
    let mut out = vec![0; 16];
    let offsets = Offsets::parse(Width::B4, &bytes).unwrap();
    offsets.predict_range(Kernels::default(), 0, &parent, &mut out).unwrap();
    assert_eq!(out, expected);
}

#[test]
fn shares_belong_to_blends_alone_and_parents_have_as_many_values() {
    let shape = [2, 2];
    let predict = |predictor: &dyn Predict, share, inputs: &[&[u8]]| {
        let mut data = Side::default();
        data.push(SideKind::OFFSETS, side(&[1, 2], &[3, 4], (0, 0, share))).unwrap();
        let tensor = Tensor { dtype: DType::BFloat16, shape: &shape, side: &data };
        predictor.predict(Kernels::default(), &tensor, 0, inputs, &mut [0; 8])
    };
    assert_eq!(predict(&Blend, 1, &[&[0; 8]]), Ok(Predicted::Written));
    assert_eq!(predict(&Rank1, 0, &[]), Ok(Predicted::Written));
    assert!(matches!(predict(&Blend, 0, &[&[0; 8]]), Err(Error::Corrupt { .. })));
    assert!(matches!(predict(&Rank1, 1, &[]), Err(Error::Corrupt { .. })));
    assert!(matches!(predict(&Blend, 1, &[&[0; 6]]), Err(Error::Corrupt { .. })));
    assert!(matches!(predict(&Blend, 1, &[&[0; 10]]), Err(Error::Corrupt { .. })));
    assert!(matches!(predict(&Blend, 1, &[]), Err(Error::Unsupported { .. })));
}

/// The offsets of 40 x 56 floats, each the product of a row's and a column's factor, with some
/// noise.
fn fitted(width: Width, seed: u32) -> Vec<u8> {
    let shape = [40, 56];
    let value = |i: u32| {
        let factor = |i: u32| f64::from((i ^ seed) * 7919 % 101 + 1).powi(-3);
        let noise = 1.0 + f64::from((i * 31 + seed) % 13) / 50.0;
        (factor(i / 56) * factor(i % 56 + 5) * noise) as f32
    };
    let bytes = |x: f32| match width {
        Width::B2 => x.to_le_bytes()[2..].to_vec(),
        Width::B4 => x.to_le_bytes().to_vec(),
        _ => f64::from(x).to_le_bytes().to_vec(),
    };
    let values: Vec<u8> = (0..40 * 56).flat_map(|i| bytes(value(i))).collect();
    rank1::fit(width, &Grid::of(&shape).unwrap(), &values).unwrap()
}

#[test]
fn offsets_of_a_blend_follow_from_those_of_both() {
    for width in [Width::B2, Width::B4, Width::B8] {
        let [first, second, third] = [1, 7, 50].map(|seed| fitted(width, seed));
        fn parse(width: Width, side: &[u8]) -> Offsets<'_> {
            Offsets::parse(width, side).unwrap()
        }
        let unit = 1i64 << parse(width, &first).shift();
        let mut before = Expected::of(&parse(width, &first), None).unwrap();
        for (own, share) in [(&second, 64), (&third, 255), (&first, 128)] {
            let own = parse(width, own);
            let alone = Expected::of(&own, None).unwrap();
            let side = rank1::blended(&own, &before, share).unwrap();
            let blend = parse(width, &side);
            assert_eq!(blend.share(), share);
            let after = Expected::of(&blend, Some(&before)).unwrap();
            // If the parent's values are just as expected, a blend predicts what rows and columns
            // alone do.
            let parents: Vec<i64> = (0..40 * 56).map(|i| before.at(i)).collect();
            let bytes = width.bytes();
            let values: Vec<u8> =
                parents.iter().flat_map(|p| p.to_le_bytes()[..bytes].to_vec()).collect();
            let mut out = vec![0; values.len()];
            blend.predict_range(Kernels::default(), 0, &values, &mut out).unwrap();
            for (i, out) in (0..).zip(out.chunks(bytes)) {
                let far = (word(out) as i64 - alone.at(i)).abs();
                assert!(far <= 3 * unit, "{width:?} {share}: {far} at {i}");
                assert!((after.at(i) - alone.at(i)).abs() <= 2 * unit, "{width:?} {share} {i}");
            }
            before = after;
        }
    }
}

#[test]
fn offsets_of_another_kind_make_no_blend() {
    let numbers = |shift, share| (1 << 20, shift, share);
    let bytes = side(&[1, 2, 3], &[4, 5], numbers(14, 0));
    let own = Offsets::parse(Width::B4, &bytes).unwrap();
    let expected = Expected::of(&own, None).unwrap();
    assert!(rank1::blended(&own, &expected, 1).is_some());
    assert!(rank1::blended(&own, &expected, 0).is_none());
    for (other, of_parent) in [
        (side(&[1, 2, 3], &[4, 5], numbers(13, 0)), None),
        (side(&[1, 2, 3], &[4, 5], numbers(14, 9)), None),
        (side(&[1, 2], &[4, 5, 6], numbers(14, 9)), Some(&expected)),
        (side(&[1, 2, 3], &[4, 5], numbers(13, 9)), Some(&expected)),
    ] {
        let other = Offsets::parse(Width::B4, &other).unwrap();
        assert!(Expected::of(&other, of_parent).is_none(), "{other:?}");
        assert!(rank1::blended(&other, &expected, 1).is_none(), "{other:?}");
    }
    let narrow = side(&[1, 2, 3], &[4, 5], (1 << 10, 0, 9));
    let narrow = Offsets::parse(Width::B2, &narrow).unwrap();
    assert!(Expected::of(&narrow, Some(&expected)).is_none());
}
