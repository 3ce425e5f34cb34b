//! Shapes and strides of tensors.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;

/// Sizes of a tensor's dimensions, or its strides: most have few.
pub(super) type Shape = SmallVec<[u64; 4]>;

/// Sizes of a tensor's dimensions, or its strides.
pub(super) fn sizes(tuple: &Bound<'_, PyAny>) -> PyResult<Shape> {
    tuple.cast::<PyTuple>()?.iter().map(|size| size.extract()).collect()
}

/// The strides of a contiguous tensor, in elements.
pub(super) fn row_major(shape: &[u64]) -> Shape {
    let (mut strides, mut step) = (Shape::new(), 1_u64);
    for &size in shape.iter().rev() {
        strides.push(step);
        step = step.saturating_mul(size.max(1));
    }
    strides.reverse();
    strides
}
