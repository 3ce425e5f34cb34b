//! Row and column offsets that are fitted only if they are needed.

use std::cell::OnceCell;

use s4_format::Result;

/// The row and column offsets of a tensor, fitted when they are first needed.
pub(crate) struct FittedOffsets<'a> {
    fit: Option<&'a dyn Fn() -> Result<Vec<u8>>>,
    fitted: OnceCell<Vec<u8>>,
}

impl<'a> FittedOffsets<'a> {
    /// `fit` fits them; `None` if they are not worth trying.
    pub(crate) fn new(fit: Option<&'a dyn Fn() -> Result<Vec<u8>>>) -> Self {
        Self { fit, fitted: OnceCell::new() }
    }

    /// Whether they are worth trying.
    pub(super) fn are_wanted(&self) -> bool {
        self.fit.is_some()
    }

    /// The offsets; `None` if they are not worth trying.
    ///
    /// # Errors
    /// Those of fitting them.
    pub(crate) fn get(&self) -> Result<Option<&[u8]>> {
        let Some(fit) = self.fit else { return Ok(None) };
        if let Some(offsets) = self.fitted.get() {
            return Ok(Some(offsets));
        }
        let offsets = fit()?;
        Ok(Some(self.fitted.get_or_init(|| offsets)))
    }
}
