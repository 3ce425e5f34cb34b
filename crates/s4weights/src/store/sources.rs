//! Tensors to be saved, wherever they are.

use s4_format::DType;

use crate::error::Result;
use crate::pack::SMALL;
use crate::parent::Parent;
use crate::writer::{TensorSource, Writer};

#[cfg(feature = "cuda")]
use crate::device::PlacedSource;

/// The tensors of a save.
#[derive(Clone, Copy)]
pub(crate) enum Sources<'a> {
    /// All in the memory of the host.
    Host(&'a [TensorSource<'a>]),
    /// In the memory of the host and of devices.
    #[cfg(feature = "cuda")]
    Placed(&'a s4_engine::cuda::CudaEngine, &'a [PlacedSource<'a>]),
}

impl<'a> Sources<'a> {
    /// Name, type, shape and bytes of each.
    fn list(self) -> Vec<(&'a str, DType, &'a [u64], u64)> {
        match self {
            Self::Host(list) => {
                list.iter().map(|t| (t.name, t.dtype, t.shape, t.data.len() as u64)).collect()
            }
            #[cfg(feature = "cuda")]
            Self::Placed(_, list) => {
                list.iter().map(|t| (t.name, t.dtype, t.shape, t.place.bytes())).collect()
            }
        }
    }

    /// Bytes of all values.
    pub(crate) fn bytes(self) -> u64 {
        self.list().iter().map(|t| t.3).sum()
    }

    /// Whether any is in the memory of a device.
    pub(crate) fn on_devices(self) -> bool {
        match self {
            Self::Host(_) => false,
            #[cfg(feature = "cuda")]
            Self::Placed(_, list) => list.iter().any(|t| t.place.memory().is_some()),
        }
    }

    /// Bytes of tensors that have no counterpart. Small ones share chunks and are never differences.
    pub(crate) fn changed(self, parent: &dyn Parent) -> u64 {
        let is_new = |&&(name, dtype, shape, bytes): &&(&str, DType, &[u64], u64)| {
            let large = bytes / dtype.value_width() as u64 >= SMALL;
            let there = parent.find(name);
            large && there.is_none_or(|p| p.dtype != dtype || p.shape != shape)
        };
        self.list().iter().filter(is_new).map(|t| t.3).sum()
    }

    /// Writes all of them. `staged` is called once the values on devices are not needed any more.
    pub(crate) fn write(
        self,
        writer: &mut Writer,
        groups: &[u8],
        staged: &mut dyn FnMut(),
    ) -> Result<()> {
        match self {
            Self::Host(list) => {
                staged();
                writer.write_grouped(list, groups)
            }
            #[cfg(feature = "cuda")]
            Self::Placed(engine, list) => writer.write_staged(engine, list, groups, staged),
        }
    }
}
