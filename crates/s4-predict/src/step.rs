//! Prediction by the optimizer's own step.
//!
//! AdamW and similar optimizers change a weight by its first moment over the root of its second, times the learning
//! rate, and by a part of the weight itself; SGD changes it by the first moment times the learning rate. The moments of a
//! checkpoint are those that its weights were computed from. So from the weights one step before, and a few constants,
//! nearly every bit of the weights is known.
//!
//! # Side data
//! 16 bytes: `keep`, `rate` and `epsilon` (`f32` each), the codes of the moments' dtypes (a byte each; 0 if there is no
//! second moment), two zeros. The prediction is that of [`s4_planes::Kernels::optimizer_step`].

use s4_format::side::SideKind;
use s4_format::{DType, Error, PredictorId, Result};
use s4_planes::{Kernels, StepFactors};

use crate::update::{float_bits, moment_codes, moments_of};
use crate::{InputKind, Predict, Predicted, Tensor};

/// Predictor `step`: see [the module](self).
#[derive(Debug, Clone, Copy, Default)]
pub struct Steps;

/// The constants of a step, and the dtypes of the moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The constants.
    pub factors: StepFactors,
    /// Dtype of the first moment.
    pub first: DType,
    /// Dtype of the second moment, if there is one.
    pub second: Option<DType>,
}

impl Step {
    /// Reads side data.
    ///
    /// # Errors
    /// `Corrupt` if `side` is not the side data of this predictor.
    pub fn parse(side: &[u8]) -> Result<Self> {
        let none = || Error::corrupt("invalid side data of predictor `step`");
        let (numbers, rest) = side.as_chunks::<4>();
        let &[keep, rate, epsilon, [first, second, 0, 0]] = numbers else { return Err(none()) };
        let [keep, rate, epsilon] = [keep, rate, epsilon].map(f32::from_le_bytes);
        let factors = StepFactors { keep, rate, epsilon };
        if !rest.is_empty() || !factors.are_valid() {
            return Err(none());
        }
        let (first, second) = moments_of([first, second]).ok_or_else(none)?;
        Ok(Self { factors, first, second })
    }

    /// Writes side data.
    pub fn to_bytes(self) -> Vec<u8> {
        let StepFactors { keep, rate, epsilon } = self.factors;
        let mut out = [keep, rate, epsilon].map(f32::to_le_bytes).concat();
        let [first, second] = moment_codes(self.first, self.second);
        out.extend([first, second, 0, 0]);
        out
    }

    /// Writes the values of `dtype` after the step. `values` are those of the parent and of the moments; without a
    /// second moment, the last are empty.
    ///
    /// # Errors
    /// `Corrupt` if the dtype has no such step, or the numbers of values differ.
    pub fn predict(
        &self,
        kernels: Kernels,
        dtype: DType,
        values: [&[u8]; 3],
        out: &mut [u8],
    ) -> Result<()> {
        // Without a second moment, any type will do.
        let bits = [dtype, self.first, self.second.unwrap_or(self.first)].map(float_bits);
        let [Some(w), Some(m), Some(v)] = bits else {
            return Err(Error::corrupt(format!(
                "predictor `step` does not support dtype {dtype} or the dtypes of its moments"
            )));
        };
        let values = [(w, values[0]), (m, values[1]), (v, values[2])];
        let count = out.len() / w.width().bytes();
        let counts = [count, count, if self.second.is_some() { count } else { 0 }];
        let mut all = values.iter().zip(counts);
        let fits = all.all(|((bits, values), count)| values.len() == count * bits.width().bytes());
        if !fits || !out.len().is_multiple_of(w.width().bytes()) {
            return Err(Error::corrupt("inputs of predictor `step` differ in number of values"));
        }
        kernels.optimizer_step(self.factors, values, out);
        Ok(())
    }
}

impl Predict for Steps {
    fn id(&self) -> PredictorId {
        PredictorId::STEP
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[InputKind::Parent, InputKind::Moment, InputKind::Moment]
    }

    fn predict(
        &self,
        kernels: Kernels,
        tensor: &Tensor<'_>,
        _: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        let step = Step::parse(tensor.side.get(SideKind::STEP))?;
        let values = match (inputs, step.second) {
            (&[weights, first], None) => [weights, first, &[]],
            (&[weights, first, second], Some(_)) => [weights, first, second],
            _ => return Err(Error::corrupt("wrong number of inputs for predictor `step`")),
        };
        step.predict(kernels, tensor.dtype, values, out)?;
        Ok(Predicted::Written)
    }

    fn is_sparse(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTORS: StepFactors = StepFactors { keep: 0.5, rate: -2.0, epsilon: 1e-8 };

    #[test]
    fn side_data_is_read_back_and_anything_else_refused() {
        for first in [DType::BFloat16, DType::Float16, DType::Float32] {
            for second in [None, Some(DType::Float16), Some(DType::Float32)] {
                let step = Step { factors: FACTORS, first, second };
                assert_eq!(Step::parse(&step.to_bytes()), Ok(step));
            }
        }
        let (first, second) = (DType::Float32, Some(DType::Float32));
        let good = Step { factors: FACTORS, first, second }.to_bytes();
        let refused = |bytes: &[u8]| matches!(Step::parse(bytes), Err(Error::Corrupt { .. }));
        for len in 0..16 {
            assert!(refused(&good[..len]), "{len}");
        }
        assert!(refused(&[&good[..], &[0]].concat()) && refused(&[&good[..], &[0; 4]].concat()));
        // Dtypes, and what must be zeros.
        for (at, byte) in [(12, 4), (12, 0), (13, 200), (14, 1), (15, 1)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(refused(&bad), "{at} {byte}");
        }
        for (at, bad) in [(0, f32::NAN), (4, f32::INFINITY), (4, f32::from_bits(1)), (8, -1e-8)] {
            let mut side = good.clone();
            side[at..at + 4].copy_from_slice(&bad.to_le_bytes());
            assert!(refused(&side), "{at} {bad}");
        }
    }

    #[test]
    fn inputs_of_other_sizes_or_dtypes_are_refused() {
        let first = DType::Float32;
        let step = Step { factors: FACTORS, first, second: Some(DType::BFloat16) };
        let (kernels, bytes) = (Kernels::default(), [0u8; 80]);
        let by = |step: Step, dtype, sizes: [usize; 3], len: usize| {
            step.predict(kernels, dtype, sizes.map(|n| &bytes[..n]), &mut [0; 80][..len])
        };
        let predict = |dtype, sizes, len| by(step, dtype, sizes, len);
        let single = Step { second: None, ..step };
        assert_eq!(by(single, DType::Float32, [40, 40, 0], 40), Ok(()));
        assert!(by(single, DType::Float32, [40, 40, 20], 40).is_err());
        assert_eq!(predict(DType::BFloat16, [20, 40, 20], 20), Ok(()));
        assert_eq!(predict(DType::Float32, [40, 40, 20], 40), Ok(()));
        for (dtype, sizes, len) in [
            (DType::BFloat16, [20, 20, 20], 20),
            (DType::BFloat16, [20, 40, 18], 20),
            (DType::BFloat16, [20, 40, 20], 21),
            (DType::Float32, [20, 40, 20], 40),
            (DType::Float64, [80, 40, 20], 80),
        ] {
            let error = predict(dtype, sizes, len).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{dtype} {sizes:?} {len}");
        }
    }
}
