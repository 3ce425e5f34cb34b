//! The constants of an optimizer's step, fitted to a sample.

use std::hint::black_box;

use s4_format::{DType, Error, Result};
use s4_planes::StepFactors;
use s4_predict::Step;
use s4_predict::update::float_bits;

use super::layout::{Candidate, SampleKind};
use super::{MomentSample, ParentSample, Sample, TensorFacts, allowed};
use crate::scratch::width_of;
use crate::{CpuEngine, Scratch};

/// The most values of the sample that the constants are fitted to: at first, and again if those constants fit.
const FIRST: usize = 512;
const MOST: usize = 4096;
/// Rounds of a fit: each leaves out what the one before found to be far off.
const ROUNDS: usize = 4;
/// Number of these values that decide what is an outlier, and whether the constants fit.
const LOOKED_AT: usize = 512;
/// PyTorch's constant that is added to roots, if the optimizer's group does not give one.
const EPSILON: f64 = 1e-8;
/// Values further off than so many times the median are left out of the next round.
const OUTLIERS: f64 = 8.0;
/// A step must explain this many bits of a difference, on average, for its cost to be estimated.
const EXPLAINED: f64 = 0.5;

/// The evidence that one value of a sample gives for the constants, relative to its size.
struct Seen {
    /// The difference from the parent.
    change: f64,
    /// The parent.
    weight: f64,
    /// First moment, and root of the second.
    first: f64,
    root: f64,
}

impl CpuEngine {
    /// The cost of a sample as the difference from what the optimizer's step makes of the parent, and the step; `None` if
    /// no step explains the differences. An earlier choice's step and layout are tried first.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    pub(super) fn by_step(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        parent: &ParentSample<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<(Candidate, Step)>> {
        let again = about.again;
        let known = again.and_then(|choice| choice.step());
        let known = known.filter(|step| may_apply(step, parent.moments));
        let step = match known {
            Some(step) => Some(step),
            None => self.step_of(about, sample, parent)?,
        };
        let Some(step) = step else { return Ok(None) };
        let tried = self.after_step(step, about, sample, parent, scratch)?;
        let Some((best, _)) = &tried else { return Ok(None) };
        if again.is_none_or(|choice| choice.leaves_little_more(best.bits)) {
            return Ok(tried);
        }
        // Other constants may be better, or another layout.
        let own = if known.is_some() { self.step_of(about, sample, parent)? } else { Some(step) };
        let Some(step) = own else { return Ok(None) };
        let about = &TensorFacts { again: None, ..*about };
        self.after_step(step, about, sample, parent, scratch)
    }

    /// The optimizer's step from the parent to the sample; `None` if no step explains the differences.
    ///
    /// # Errors
    /// As [`CpuEngine::by_step`].
    pub(super) fn step_of(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        parent: &ParentSample<'_>,
    ) -> Result<Option<Step>> {
        if !allowed(about.preset).step {
            return Ok(None);
        }
        let values = (&sample.values[..], parent.values);
        self.fit_step(about.dtype, values, parent.moments, about.epsilon)
    }

    /// The cost of what a step leaves, and the step.
    fn after_step(
        &self,
        step: Step,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        parent: &ParentSample<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<(Candidate, Step)>> {
        let [first, ref second @ ..] = *parent.moments else { return Ok(None) };
        let second = second.first().map_or(&[][..], |second| second.values);
        let mut predicted = vec![0; parent.values.len()];
        let inputs = [parent.values, first.values, second];
        step.predict(self.kernels, about.dtype, inputs, &mut predicted)?;
        let mut rest = sample.values.to_vec();
        self.kernels.sub_values(width_of(about.width())?, &mut rest, &predicted);
        let best = self.best(about, &rest, SampleKind::Ordered, scratch)?;
        let listed = parent.moments.len();
        Ok(best.map(|best| (best.with_moments(listed, about, rest.len()), step)))
    }

    /// The step that takes a parent's values to those of the sample; `None` if it is not an optimizer's.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    fn fit_step(
        &self,
        dtype: DType,
        (values, parent): (&[u8], &[u8]),
        moments: &[MomentSample<'_>],
        epsilon: Option<f64>,
    ) -> Result<Option<Step>> {
        let Some((first, second)) = moments.split_first() else { return Ok(None) };
        let second = second.first();
        let n = values.len() / dtype.value_width();
        let mut floats = [const { vec![] }; 4];
        let given = [(dtype, values), (dtype, parent)].into_iter();
        let given = given.chain(moments.iter().map(|m| (m.dtype, m.values)));
        for (to, (dtype, values)) in floats.iter_mut().zip(given) {
            let Some(bits) = float_bits(dtype) else { return Ok(None) };
            if values.len() != n * bits.width().bytes() {
                return Err(Error::corrupt("sample and moments differ in number of values"));
            }
            to.resize(n, 0.0);
            self.kernels.to_floats(bits, values, to);
        }
        if !rounds_to_nearest() {
            return Ok(None);
        }
        // Whatever the role table says. Without second moments, first moments are divided by 1.
        let epsilon = epsilon.filter(|e| (1e-30..1e3).contains(e)).unwrap_or(EPSILON);
        let (has_second, epsilon) = (second.is_some(), second.map_or(1.0, |_| epsilon));
        floats[3].resize(n, 0.0);
        let mut start = Constants { keep: 0.0, rate: 0.0, epsilon };
        for most in [FIRST, MOST] {
            let seen = seen(&floats, most);
            let Some(found) = fit(&seen, start, has_second) else { return Ok(None) };
            if !found.explains(&seen, dtype) {
                return Ok(None);
            }
            start = found;
        }
        let Constants { keep, rate, epsilon } = start;
        // A number that is too small to be a constant changes nothing.
        let single = |x: f64| if x.abs() < 1e-37 { 0.0 } else { x as f32 };
        let factors =
            StepFactors { keep: single(1.0 + keep), rate: single(rate), epsilon: single(epsilon) };
        let (first, second) = (first.dtype, second.map(|m| m.dtype));
        Ok(factors.are_valid().then_some(Step { factors, first, second }))
    }
}

/// Whether a step that was found for another tensor can also be the step of a tensor with these moments.
fn may_apply(step: &Step, moments: &[MomentSample<'_>]) -> bool {
    let dtypes = std::iter::once(step.first).chain(step.second);
    dtypes.eq(moments.iter().map(|m| m.dtype)) && rounds_to_nearest()
}

/// The constants of a step: a weight changes by `keep` of itself less `rate * first / (root + epsilon)`.
#[derive(Debug, Clone, Copy)]
struct Constants {
    keep: f64,
    rate: f64,
    epsilon: f64,
}

impl Constants {
    /// The part of a value's change that is not explained, given the quotient of its moments.
    fn rest(&self, s: &Seen, quotient: f64) -> f64 {
        s.change - self.keep * s.weight + self.rate * quotient
    }

    /// The first moment of a value over the root of its second.
    fn quotient(&self, s: &Seen) -> f64 {
        s.first / (s.root + self.epsilon)
    }

    /// The deviation of a value. Before there is a rate, large quotients are left out: one that no step explains would
    /// outweigh all others.
    fn size(&self, s: &Seen, quotient: f64) -> f64 {
        if self.rate == 0.0 { quotient.abs() } else { self.rest(s, quotient).abs() }
    }

    /// Whether they explain at least [`EXPLAINED`] bits of the differences.
    fn explains(&self, seen: &[Seen], dtype: DType) -> bool {
        // Nothing below a rounded value's own error counts.
        let least = match dtype {
            DType::BFloat16 => 2f64.powi(-9),
            DType::Float16 => 2f64.powi(-12),
            _ => 2f64.powi(-25),
        };
        let size = |x: f64| (x.abs() / least).max(1.0);
        let mut saved = 0.0;
        let some = some_of(seen);
        for s in some.clone() {
            saved += (size(s.change) / size(self.rest(s, self.quotient(s)))).log2();
        }
        saved > EXPLAINED * some.count() as f64
    }
}

/// Up to `most` values of a sample that tell something: those that are not zero, infinite or NaN.
fn seen(floats: &[Vec<f32>; 4], most: usize) -> Vec<Seen> {
    let [values, parent, first, second] = floats;
    let step = values.len().div_ceil(most).max(1);
    let mut out = vec![];
    for i in (0..values.len()).step_by(step) {
        let (x, p) = (f64::from(values[i]), f64::from(parent[i]));
        let (m, v) = (f64::from(first[i]), f64::from(second[i]));
        let size = x.abs().max(p.abs());
        let finite = x.is_finite() && p.is_finite() && m.is_finite() && v.is_finite();
        if finite && size > 1e-30 && v >= 0.0 {
            let part = 1.0 / size;
            let (change, weight) = ((x - p) * part, p * part);
            out.push(Seen { change, weight, first: m * part, root: v.sqrt() });
        }
    }
    out
}

/// About [`LOOKED_AT`] of some values, evenly spaced.
fn some_of(seen: &[Seen]) -> impl Iterator<Item = &Seen> + Clone {
    seen.iter().step_by(seen.len().div_ceil(LOOKED_AT).max(1))
}

/// The constants by least squares, from those of an earlier fit; `None` if the values do not determine them. `epsilon`
/// is only fitted if there are second moments.
fn fit(seen: &[Seen], start: Constants, has_second: bool) -> Option<Constants> {
    let mut found = start;
    for _ in 0..ROUNDS {
        // Without zeros: rows of an embedding that was never used have no moments.
        let sizes = some_of(seen).map(|s| found.size(s, found.quotient(s)));
        let sizes = sizes.filter(|size| size.is_finite() && *size > 0.0);
        let limit = median(sizes.collect()).map_or(0.0, |median| OUTLIERS * median);
        let mut sums = [[0.0; 4]; 3];
        for s in seen {
            let quotient = found.quotient(s);
            // The change that a larger epsilon would make.
            let by_epsilon = match has_second {
                true => found.rate * quotient / (s.root + found.epsilon),
                false => 0.0,
            };
            let row = [s.weight, -quotient, by_epsilon, s.change];
            // False for a NaN.
            if found.size(s, quotient) <= limit && by_epsilon.is_finite() {
                for i in 0..3 {
                    for k in 0..4 {
                        sums[i][k] += row[i] * row[k];
                    }
                }
            }
        }
        let [keep, rate, more] = solve(sums)?;
        // A root is of no use below zero, and far above the old one the derivative says nothing.
        let epsilon = (found.epsilon + more).clamp(found.epsilon / 16.0, found.epsilon * 16.0);
        found = Constants { keep, rate, epsilon };
    }
    let Constants { keep, rate, epsilon } = found;
    (keep.is_finite() && rate.is_finite() && epsilon.is_finite()).then_some(found)
}

/// The middle of some numbers; `None` if there are none.
fn median(mut numbers: Vec<f64>) -> Option<f64> {
    let middle = numbers.len() / 2;
    let found =
        (!numbers.is_empty()).then(|| numbers.select_nth_unstable_by(middle, f64::total_cmp));
    found.map(|(_, median, _)| *median)
}

/// Solves three linear equations, whose last column is the right side. An unknown that they do not determine is 0;
/// `None` if they determine none.
fn solve(mut rows: [[f64; 4]; 3]) -> Option<[f64; 3]> {
    // Unknowns in units that make the diagonal ones.
    let units = [0, 1, 2].map(|i| rows[i][i].sqrt());
    for (row, own) in rows.iter_mut().zip(units) {
        for (x, other) in row.iter_mut().zip(units.into_iter().chain([1.0])) {
            let unit = own * other;
            *x = if unit > 0.0 && unit.is_finite() { *x / unit } else { 0.0 };
        }
    }
    let mut used = vec![];
    for i in 0..3 {
        // The matrix is symmetric and has no negative eigenvalues: no pivot needs to be searched.
        let pivot = rows[i];
        if pivot[i] < 1e-12 {
            continue;
        }
        used.push(i);
        for k in (0..3).filter(|k| *k != i) {
            let part = rows[k][i] / pivot[i];
            rows[k].iter_mut().zip(pivot).for_each(|(x, y)| *x -= part * y);
        }
    }
    let mut out = [0.0; 3];
    used.iter().for_each(|&i| out[i] = rows[i][3] / rows[i][i] / units[i]);
    (!used.is_empty()).then_some(out)
}

/// Whether this thread rounds floating-point results the way a reader will.
fn rounds_to_nearest() -> bool {
    let [one, less, more] = [1.0, 0.25 * f32::EPSILON, 0.75 * f32::EPSILON].map(black_box);
    one + less == 1.0 && -one - less == -1.0 && one + more == 1.0 + f32::EPSILON
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values like those of a training run, with the given constants, in full precision.
    fn like(constants: Constants, n: usize) -> Vec<Seen> {
        let noise = |i: usize, k: u32| {
            let x = (i as u64 * 4 + u64::from(k) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            f64::from((x >> 40) as u32) / f64::from(1 << 24) - 0.5
        };
        let of = |i: usize| {
            let (weight, first) = (0.04 * noise(i, 0), 1e-5 * noise(i, 1));
            let root = 1e-6 + 1e-5 * (noise(i, 2) + 0.5);
            let change =
                constants.keep * weight - constants.rate * first / (root + constants.epsilon);
            let size = weight.abs().max((weight + change).abs());
            Seen { change: change / size, weight: weight / size, first: first / size, root }
        };
        (0..n).map(of).collect()
    }

    #[test]
    fn constants_are_found_beside_values_that_no_step_explains() {
        for epsilon in [1e-8, 3e-9, 1e-7] {
            let real = Constants { keep: -3e-5, rate: 3e-4, epsilon };
            let mut seen = like(real, 4000);
            for (i, s) in seen.iter_mut().enumerate().step_by(20) {
                match i % 3 {
                    0 => s.change += 1.0,
                    1 => s.first = 1e30,
                    _ => s.root = 0.0,
                }
            }
            let found =
                fit(&seen, Constants { keep: 0.0, rate: 0.0, epsilon: 1e-8 }, true).unwrap();
            let near = |a: f64, b: f64, most: f64| (a / b - 1.0).abs() < most;
            assert!(near(found.rate, real.rate, 1e-6), "{found:?}");
            assert!(near(1.0 + found.keep, 1.0 + real.keep, 1e-9), "{found:?}");
            assert!(near(found.epsilon, real.epsilon, 1e-2), "{found:?}");
            assert!(found.explains(&seen, DType::Float32));
        }
    }

    #[test]
    fn constants_are_found_where_most_values_stay_the_same() {
        let real = Constants { keep: -3e-5, rate: 3e-4, epsilon: 1e-8 };
        let mut seen = like(real, 4000);
        // Rounded to bf16, a value changes if its change reaches half of a unit in its last place.
        for s in &mut seen {
            let unit = 2f64.powi(-5);
            s.change = (s.change / unit).round() * unit;
        }
        assert!(seen.iter().filter(|s| s.change == 0.0).count() > 2000);
        let found = fit(&seen, Constants { keep: 0.0, rate: 0.0, epsilon: 1e-8 }, true).unwrap();
        assert!((found.rate / real.rate - 1.0).abs() < 0.2, "{found:?}");
    }

    #[test]
    fn constants_are_found_where_most_moments_are_zero() {
        let real = Constants { keep: -3e-5, rate: 3e-4, epsilon: 1e-8 };
        let mut seen = like(real, 4000);
        for s in seen.iter_mut().filter(|s| s.weight > -0.5) {
            (s.first, s.root, s.change) = (0.0, 0.0, real.keep * s.weight);
        }
        assert!(seen.iter().filter(|s| s.first == 0.0).count() >= 2000);
        let found = fit(&seen, Constants { keep: 0.0, rate: 0.0, epsilon: 1e-8 }, true).unwrap();
        assert!((found.rate / real.rate - 1.0).abs() < 1e-6, "{found:?}");
        assert!((found.keep / real.keep - 1.0).abs() < 1e-3, "{found:?}");
    }

    #[test]
    fn without_second_moments_the_first_are_the_update() {
        let real = Constants { keep: -1e-5, rate: 0.1, epsilon: 1.0 };
        let mut seen = like(real, 4000);
        for s in &mut seen {
            s.root = 0.0;
            s.change = real.keep * s.weight - real.rate * s.first;
        }
        let start = Constants { keep: 0.0, rate: 0.0, epsilon: 1.0 };
        let found = fit(&seen, start, false).unwrap();
        assert!((found.rate / real.rate - 1.0).abs() < 1e-6, "{found:?}");
        assert!((found.keep / real.keep - 1.0).abs() < 1e-3, "{found:?}");
        assert!(found.epsilon == 1.0 && found.explains(&seen, DType::Float32), "{found:?}");
    }

    #[test]
    fn nothing_is_found_where_nothing_changes_or_by_chance() {
        let still = like(Constants { keep: 0.0, rate: 0.0, epsilon: 1e-8 }, 1000);
        let start = Constants { keep: 0.0, rate: 0.0, epsilon: 1e-8 };
        let found = fit(&still, start, true);
        assert!(found.is_none_or(|found| !found.explains(&still, DType::Float32)));
        let mut any = like(Constants { keep: -3e-5, rate: 3e-4, epsilon: 1e-8 }, 1000);
        let n = any.len();
        for i in 0..n {
            any[i].change = any[(i * 7 + 3) % n].change;
        }
        let found = fit(&any, start, true);
        assert!(found.is_none_or(|found| !found.explains(&any, DType::Float32)));
        assert!(fit(&[], start, true).is_none());
    }

    #[test]
    fn whatever_a_role_says_of_epsilon_the_step_is_found() {
        let engine = CpuEngine::new(s4_planes::Simd::detect());
        let real = Constants { keep: -3e-5, rate: 3e-4, epsilon: 1e-8 };
        let mut all = [const { vec![] }; 4];
        for s in like(real, 3000) {
            // `like` gives values relative to their size, which may be anything.
            let after = s.weight + s.change;
            for (to, x) in all.iter_mut().zip([after, s.weight, s.first, s.root * s.root]) {
                to.extend((x as f32).to_le_bytes());
            }
        }
        let [values, parent, first, second] = &all;
        let moment = |values| MomentSample { tensor: 1, dtype: DType::Float32, values };
        let moments = [moment(first), moment(second)];
        let hostile = [f64::NAN, -1e-8, 0.0, f64::INFINITY, f64::MAX, 1e-300, -f64::MAX];
        for epsilon in hostile.map(Some).into_iter().chain([None, Some(1e-8), Some(1e-6)]) {
            let found = engine.fit_step(DType::Float32, (values, parent), &moments, epsilon);
            let rate = found.unwrap().map(|step| f64::from(step.factors.rate));
            assert!(
                rate.is_some_and(|rate| (rate / 3e-4 - 1.0).abs() < 1e-3),
                "{epsilon:?}: {rate:?}"
            );
        }
    }

    #[test]
    fn this_thread_rounds_to_nearest() {
        assert!(rounds_to_nearest());
    }
}
