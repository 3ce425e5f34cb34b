//! Predictor `step` as its page describes it.

mod page;

use s4_format::DType;
use s4_format::side::{Side, SideKind};
use s4_planes::{Kernels, Simd, StepFactors, Width};
use s4_predict::{Predict, Predicted, Step, Steps, Tensor};

/// The start of the first table of examples.
const START: &str = "| p | m | v |";
const PAGE: &str = include_str!("../../../docs/predictors/step.md");

#[test]
fn the_example_without_a_second_moment() {
    let page = PAGE.split_once("Without a second moment, `keep`").unwrap().1;
    let step = Step::parse(&page::side_data(page)).unwrap();
    let factors = StepFactors { keep: 1.0, rate: 0.1, epsilon: 1.0 };
    assert_eq!(step, Step { factors, first: DType::BFloat16, second: None });
    let rows = page::table(page, "| p | m | q | x |", 2);
    let column = |i: usize| rows.iter().map(move |row| page::hex(row[i]));
    let wide = |i| column(i).flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let first: Vec<u8> = column(1).flat_map(|x| (x as u16).to_le_bytes()).collect();
    assert!(column(1).zip(column(2)).all(|(m, q)| m << 16 == q));
    for kernels in Simd::available().map(Kernels::new) {
        let mut out = [99; 8];
        step.predict(kernels, DType::Float32, [&wide(0), &first, &[]], &mut out).unwrap();
        assert_eq!(&out[..], &wide(3)[..]);
    }
}

#[test]
fn the_example_of_the_specification() {
    let side_data = page::side_data(PAGE);
    let step = Step::parse(&side_data).unwrap();
    let factors = StepFactors { keep: 0.99997, rate: 0.0003, epsilon: 1e-8 };
    assert_eq!(step, Step { factors, first: DType::Float32, second: Some(DType::BFloat16) });
    let rows = page::table(PAGE, START, 4);
    let column = |i: usize| rows.iter().map(move |row| page::hex(row[i]));
    let wide = |i| column(i).flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let second: Vec<u8> = column(2).flat_map(|x| (x as u16).to_le_bytes()).collect();
    let (parent, first, expected, stored, residuals) =
        (wide(0), wide(1), wide(4), wide(5), wide(6));
    for (i, quotient) in column(3).enumerate() {
        let root = f32::from_bits(page::hex(rows[i][2]) << 16).sqrt();
        // The third of the first moments is taken for 0.
        let first = if i == 2 { 0.0 } else { f32::from_bits(page::hex(rows[i][1])) };
        assert_eq!((first / (root + factors.epsilon)).to_bits(), quotient, "{i}");
    }
    let mut side = Side::default();
    side.push(SideKind::STEP, side_data).unwrap();
    let tensor = Tensor { dtype: DType::Float32, shape: &[4], side: &side };
    for kernels in Simd::available().map(Kernels::new) {
        let mut out = [99; 16];
        let inputs: [&[u8]; 3] = [&parent, &first, &second];
        let predicted = Steps.predict(kernels, &tensor, 0, &inputs, &mut out).unwrap();
        assert_eq!((predicted, &out[..]), (Predicted::Written, &expected[..]));
        let mut values = stored.clone();
        kernels.sub_values(Width::B4, &mut values, &out);
        assert_eq!(values, residuals);
        assert!(Steps.predict(kernels, &tensor, 0, &inputs[..2], &mut out).is_err());
        let mut alone = Side::default();
        alone.push(SideKind::STEP, Step { second: None, ..step }.to_bytes()).unwrap();
        let alone = Tensor { side: &alone, ..tensor };
        assert!(Steps.predict(kernels, &alone, 0, &inputs[..2], &mut out).is_ok());
        assert!(Steps.predict(kernels, &alone, 0, &inputs, &mut out).is_err());
        let bare = Tensor { side: &Side::default(), ..tensor };
        assert!(Steps.predict(kernels, &bare, 0, &inputs, &mut out).is_err());
    }
}
