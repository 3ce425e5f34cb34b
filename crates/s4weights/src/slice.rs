//! Parts of a tensor.

use std::ops::Range;

use crate::error::{Error, Result};

/// A row-major array within the bytes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArrayView<'a> {
    /// Offset of its start, in bytes.
    pub offset: u64,
    /// Bytes of an element.
    pub item: u64,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
}

/// A hyper-rectangle of a tensor: a range of indices in each dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice(pub Vec<Range<u64>>);

impl Slice {
    /// Checks the slice against a shape; returns the number of elements.
    pub(crate) fn check(&self, name: &str, shape: &[u64]) -> Result<u64> {
        let fits = |(r, &d): (&Range<u64>, &u64)| r.start <= r.end && r.end <= d;
        if self.0.len() != shape.len() || !self.0.iter().zip(shape).all(fits) {
            return Err(Error::Argument(format!(
                "slice {:?} does not lie within shape {shape:?} of tensor `{name}`",
                self.0
            )));
        }
        // The dimensions of an empty tensor may be so large that their product overflows.
        if self.0.iter().any(|r| r.start == r.end) {
            return Ok(0);
        }
        Ok(self.0.iter().map(|r| r.end - r.start).product())
    }

    /// Runs of adjacent elements, in row-major order: first element and end.
    pub(crate) fn runs<'a>(
        &'a self,
        shape: &'a [u64],
    ) -> impl Iterator<Item = Range<u64>> + Clone + 'a {
        let some = self.0.iter().all(|r| r.start < r.end);
        // Trailing dimensions that are taken whole belong to one run.
        let whole = (self.0.iter().zip(shape)).rev().take_while(|(r, d)| r.end - r.start == **d);
        let inner = shape.len() - whole.count();
        let block: u64 = if some { shape[inner..].iter().product() } else { 0 };
        let ranges = &self.0[..inner];
        let len = ranges.last().map_or(1, |r| r.end - r.start) * block;
        let mut next = some.then(|| ranges.iter().map(|r| r.start).collect::<Vec<_>>());
        std::iter::from_fn(move || {
            let index = next.as_mut()?;
            let first = index.iter().zip(shape).fold(0, |at, (i, d)| at * d + i) * block;
            // Count up the dimensions outside the run, the last one fastest.
            let outside = inner.saturating_sub(1);
            match (0..outside).rev().find(|&d| index[d] + 1 < ranges[d].end) {
                Some(d) => {
                    index[d] += 1;
                    for (i, range) in index[d + 1..outside].iter_mut().zip(&ranges[d + 1..]) {
                        *i = range.start;
                    }
                }
                None => next = None,
            }
            Some(first..first + len)
        })
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "a slice of one dimension is one range")]
mod tests {
    use super::*;

    fn elements(slice: &Slice, shape: &[u64]) -> Vec<u64> {
        slice.runs(shape).flatten().collect()
    }

    #[test]
    fn runs_cover_exactly_the_slice() {
        let shape = [3, 4, 5];
        for (a, b, c) in
            [(0..3, 0..4, 0..5), (1..2, 0..4, 0..5), (0..3, 1..3, 2..4), (2..3, 3..4, 4..5)]
        {
            let slice = Slice(vec![a.clone(), b.clone(), c.clone()]);
            let mut want = vec![];
            for i in a {
                for j in b.clone() {
                    want.extend(c.clone().map(|k| (i * 4 + j) * 5 + k));
                }
            }
            assert_eq!(slice.check("t", &shape).unwrap(), want.len() as u64);
            assert_eq!(elements(&slice, &shape), want);
        }
        let runs =
            |ranges: Vec<Range<u64>>, shape: &[u64]| Slice(ranges).runs(shape).collect::<Vec<_>>();
        assert_eq!(runs(vec![0..3, 0..4, 0..5], &shape), [0..60]);
        assert_eq!(runs(vec![], &[]), [0..1]);
        assert!(runs(vec![0..3, 2..2, 0..5], &shape).is_empty());
        let huge = [u64::MAX, u64::MAX, 0];
        assert_eq!(Slice(huge.map(|d| 0..d).to_vec()).check("t", &huge).unwrap(), 0);
        assert!(runs(huge.map(|d| 0..d).to_vec(), &huge).is_empty());
        assert!(Slice(vec![0..4]).check("t", &[3]).is_err());
        assert!(Slice(vec![]).check("t", &[3]).is_err());
    }
}
