//! Predictor `step` as its page describes it.

mod page;

use s4_format::DType;
use s4_format::side::{Side, SideKind};
use s4_planes::{Kernels, Simd, StepFactors, Width};
use s4_predict::{Predict, Predicted, Step, Steps, Tensor};

const PAGE: &str = include_str!("../../../docs/predictors/step.md");

#[test]
fn the_example_of_the_specification() {
    let side_data = page::side_data(PAGE);
    let step = Step::parse(&side_data).unwrap();
    let factors = StepFactors { keep: 0.99997, rate: 0.0003, epsilon: 1e-8 };
    assert_eq!(step, Step { factors, moments: [DType::Float32, DType::BFloat16] });
    let rows = page::table(PAGE, 4);
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
        let bare = Tensor { side: &Side::default(), ..tensor };
        assert!(Steps.predict(kernels, &bare, 0, &inputs, &mut out).is_err());
    }
}
