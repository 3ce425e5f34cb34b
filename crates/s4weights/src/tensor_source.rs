//! A tensor to be written, as the caller gives it.

use s4_engine::Values;
use s4_format::DType;

/// A tensor to be written.
#[derive(Debug, Clone, Copy)]
pub struct TensorSource<'a> {
    /// Unique in the file, not empty.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements. Values in device memory need [`crate::WriteOptions::engine`].
    pub values: Values<'a>,
    /// Below 4. A checkpoint in objects keeps tensors of different groups in different objects, so
    /// that weights (0) can be read, or kept, without the optimizer's state (1).
    pub group: u8,
}

impl<'a> TensorSource<'a> {
    /// A tensor of group 0.
    pub fn new(
        name: &'a str,
        dtype: DType,
        shape: &'a [u64],
        values: impl Into<Values<'a>>,
    ) -> Self {
        Self { name, dtype, shape, values: values.into(), group: 0 }
    }

    /// The same tensor, of another group.
    #[must_use]
    pub fn in_group(self, group: u8) -> Self {
        Self { group, ..self }
    }

    pub(crate) fn is_on_device(&self) -> bool {
        self.values.memory().is_some()
    }
}
