//! Differences from predicted bits.

use s4_format::{Error, ResidualId, Result};
use s4_planes::{Kernels, Width};

/// The form of the difference between elements and the parent's elements.
///
/// ```
/// use s4_delta::Residual;
/// use s4_planes::{Kernels, Width};
///
/// let kernels = Kernels::default();
/// let parent = 1.0_f32.to_le_bytes();
/// let mut buf = 1.000_000_1_f32.to_le_bytes();
/// Residual::Sub.diff(kernels, Width::B4, &parent, &mut buf)?;
/// assert_eq!(buf, [2, 0, 0, 0]); // zigzag(+1): the next float after 1.0
/// Residual::Sub.apply(kernels, Width::B4, &parent, &mut buf)?;
/// assert_eq!(f32::from_le_bytes(buf), 1.000_000_1);
/// # Ok::<(), s4_format::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Residual {
    /// The XOR of the bits. It is its own inverse.
    Xor,
    /// The difference in the order of values, zigzag-coded: see [`Kernels::sub_values`].
    Sub,
    /// The sign, and the zigzag-coded difference of the magnitudes: see [`Kernels::sub_magnitudes`].
    Magnitude,
    /// As `Sub`, but negated where the first moment is positive. The negation is left to the
    /// caller: [`Kernels::negate_where_positive`].
    Descent,
}

impl Residual {
    /// Its id in a plan.
    pub fn id(self) -> ResidualId {
        match self {
            Self::Xor => ResidualId::XOR,
            Self::Sub => ResidualId::SUB,
            Self::Magnitude => ResidualId::MAGNITUDE,
            Self::Descent => ResidualId::DESCENT,
        }
    }

    /// The residual with this id; `None` for [`ResidualId::ID`], which is not a difference, and for
    /// unknown ids.
    pub fn from_id(id: ResidualId) -> Option<Self> {
        let all = [Self::Xor, Self::Sub, Self::Magnitude, Self::Descent];
        all.into_iter().find(|residual| residual.id() == id)
    }

    /// Replaces the elements in `buf` by their differences from `parent`, which holds the same
    /// elements of the parent.
    ///
    /// # Errors
    /// As [`Residual::apply`].
    pub fn diff(self, kernels: Kernels, width: Width, parent: &[u8], buf: &mut [u8]) -> Result<()> {
        self.check(width, parent, buf)?;
        match self {
            Self::Xor => kernels.xor(buf, parent),
            Self::Sub | Self::Descent => kernels.sub_values(width, buf, parent),
            Self::Magnitude => kernels.sub_magnitudes(width, buf, parent),
        }
        Ok(())
    }

    /// Undoes [`Residual::diff`].
    ///
    /// # Errors
    /// `Corrupt` if the sizes differ or are not whole elements. `buf` is untouched then.
    pub fn apply(
        self,
        kernels: Kernels,
        width: Width,
        parent: &[u8],
        buf: &mut [u8],
    ) -> Result<()> {
        self.check(width, parent, buf)?;
        match self {
            Self::Xor => kernels.xor(buf, parent),
            Self::Sub | Self::Descent => kernels.add_values(width, buf, parent),
            Self::Magnitude => kernels.add_magnitudes(width, buf, parent),
        }
        Ok(())
    }

    fn check(self, width: Width, parent: &[u8], buf: &[u8]) -> Result<()> {
        if parent.len() != buf.len() {
            return Err(Error::corrupt(format!(
                "difference has {} bytes, but its parent has {}",
                buf.len(),
                parent.len()
            )));
        }
        if !buf.len().is_multiple_of(width.bytes()) {
            let what = format!(
                "{} bytes are not a multiple of the element size {}",
                buf.len(),
                width.bytes()
            );
            return Err(Error::corrupt(what));
        }
        Ok(())
    }
}
