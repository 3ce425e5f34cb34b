//! Planes of a layout: how many bytes each plane of a chunk has.

use crate::error::{Error, Result};
use crate::id::LayoutId;

/// The most planes that a layout has: those of `bytes` for 8-byte values.
pub const MAX_PLANES: usize = 8;

/// Sizes of the planes of one chunk, in bytes, in the order of the streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planes {
    sizes: [usize; MAX_PLANES],
    len: usize,
}

impl Planes {
    fn of(sizes: &[usize]) -> Self {
        let mut out = Self { sizes: [0; MAX_PLANES], len: sizes.len() };
        out.sizes[..sizes.len()].copy_from_slice(sizes);
        out
    }

    /// The planes of `values` values of `width` bytes.
    ///
    /// The second plane of `token` has as many bits as the tokens say: its size here is the largest
    /// possible one.
    ///
    /// # Errors
    /// `Unsupported` if the layout is unknown or does not exist for this width.
    pub fn new(layout: LayoutId, width: usize, values: usize) -> Result<Self> {
        let n = values;
        layout.require_open()?;
        let float = matches!(width, 2 | 4 | 8);
        if !(float || width == 1) {
            return Err(Error::unsupported(format!("values of {width} bytes")));
        }
        Ok(match layout {
            LayoutId::WHOLE => Self::of(&[n * width]),
            LayoutId::BYTES => Self::of(&[n; MAX_PLANES][..width]),
            LayoutId::FIELDS if width == 2 => Self::of(&[n, n]),
            LayoutId::FIELDS if float => Self::of(&[n, n, n * (width - 2)]),
            LayoutId::FIELDS_SIGN if width == 2 => Self::of(&[n.div_ceil(8), n, n]),
            LayoutId::FIELDS_SIGN if float => Self::of(&[n.div_ceil(8), n, n, n * (width - 2)]),
            LayoutId::TOKEN => Self::of(&[n, n * width]),
            _ => {
                return Err(Error::unsupported(format!(
                    "layout `{layout}` for values of {width} bytes"
                )));
            }
        })
    }

    /// The sizes, in bytes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_each_layout() {
        let sizes = |l, w, n| Planes::new(l, w, n).map(|p| p.sizes().to_vec());
        assert_eq!(sizes(LayoutId::FIELDS, 2, 9).unwrap(), [9, 9]);
        assert_eq!(sizes(LayoutId::FIELDS, 4, 9).unwrap(), [9, 9, 18]);
        assert_eq!(sizes(LayoutId::FIELDS_SIGN, 8, 9).unwrap(), [2, 9, 9, 54]);
        assert_eq!(sizes(LayoutId::BYTES, 8, 3).unwrap(), [3; 8]);
        assert_eq!(sizes(LayoutId::WHOLE, 4, 3).unwrap(), [12]);
        assert!(sizes(LayoutId::FIELDS, 1, 3).is_err());
        assert!(sizes(LayoutId(99), 4, 3).is_err());
    }
}
