//! Writing tensors, from host or device memory.

use s4_engine::Values;
#[cfg(feature = "cuda")]
use s4_engine::cuda::FetchItem;

use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::inputs::Failure;
use crate::options::StagedFn;
use crate::output::MAX_GROUPS;
use crate::pack::SMALL;
use crate::progress::Meter;
use crate::tensor_source::TensorSource;
use crate::writer::Writer;

/// A tensor that is registered with the writer, and its number.
pub(crate) struct Registered<'a> {
    pub(crate) number: usize,
    pub(crate) source: TensorSource<'a>,
}

/// Work that still needs values on devices.
pub(crate) struct Awaited {
    staged: Option<StagedFn>,
    /// Whether small tensors are still to be packed.
    small: bool,
    /// Batches of large tensors that are still to be encoded.
    pub(crate) large: usize,
}

impl Awaited {
    /// Calls `staged`, once, as soon as no work is left that needs values on devices.
    pub(crate) fn tell(&mut self) {
        if !self.small
            && self.large == 0
            && let Some(staged) = self.staged.take()
        {
            staged();
        }
    }
}

impl Writer {
    /// Writes tensors; may be called several times. Values on devices are encoded there, to the
    /// same bytes as the same values in host memory. This includes deltas, for which the parent's
    /// values are uploaded.
    ///
    /// # Errors
    /// `Argument` for a name that is empty or taken, for values that do not have the shape's size
    /// or are on a device while there is no engine for devices, and for a group of 4 or more; `Io`
    /// if the target fails, `Cancelled`, `Device`, and the errors of reading the parent. After an
    /// error the checkpoint cannot be finished.
    pub fn write(&mut self, tensors: &[TensorSource<'_>]) -> Result<()> {
        self.adding(|writer| writer.write_all(tensors))
    }

    fn write_all(&mut self, tensors: &[TensorSource<'_>]) -> Result<()> {
        tensors.iter().try_for_each(|t| self.check(t))?;
        let total = tensors.iter().map(|t| t.values.bytes()).sum();
        let callback = self.options.progress.clone();
        let mut meter = Meter { callback, done: 0, total };
        let staged = self.options.staged.clone();
        let any = tensors.iter().any(TensorSource::is_on_device);
        let mut awaited = Awaited { staged, small: any, large: 0 };
        awaited.tell();
        let (mut small, mut large) = (vec![], vec![]);
        for &source in tensors {
            let number = self.next_number();
            let TensorSource { name, dtype, shape, values, .. } = source;
            let list = match self.register(name, dtype, shape, values.bytes())? {
                values if values < SMALL => &mut small,
                _ => &mut large,
            };
            list.push(Registered { number, source });
        }
        self.pack_small(&small, &mut meter)?;
        awaited.small = false;
        self.write_large(&large, &mut awaited, &mut meter)
    }

    fn check(&self, tensor: &TensorSource<'_>) -> Result<()> {
        let TensorSource { name, group, .. } = tensor;
        if *group >= MAX_GROUPS {
            return Err(Error::Argument(format!(
                "tensor `{name}` is in group {group}, but groups must be below {MAX_GROUPS}"
            )));
        }
        if tensor.is_on_device() && !self.options.has_engine() {
            let what =
                format!("tensor `{name}` is on a device, but no engine for devices was given");
            return Err(Error::Argument(what));
        }
        Ok(())
    }

    /// Packs the small tensors that are in host memory, in order.
    fn pack_host(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        for t in small {
            if let Values::Host(data) = t.source.values {
                self.pack(t.number, data, t.source.group)?;
                meter.add(data.len() as u64)?;
            }
        }
        Ok(())
    }

    /// Packs small tensors, in their order.
    #[cfg(feature = "cuda")]
    fn pack_small(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        let Some(engine) = self.options.engine.clone() else { return self.pack_host(small, meter) };
        let there =
            |(i, t): (usize, &Registered<'_>)| Some((i, FetchItem::all(t.source.values.memory()?)));
        let (numbers, items): (Vec<_>, Vec<_>) = small.iter().enumerate().filter_map(there).unzip();
        let target = self.name.clone();
        let mut packed = 0;
        let done = engine.fetch::<Failure>(&items, |batch| {
            for &(i, bytes) in batch {
                // The tensors between two fetched ones are all in host memory.
                self.pack_host(&small[packed..numbers[i]], meter)?;
                let t = &small[numbers[i]];
                self.pack(t.number, bytes, t.source.group)?;
                meter.add(bytes.len() as u64)?;
                packed = numbers[i] + 1;
            }
            Ok(())
        });
        done.map_err(|e| e.named(&target, |i| Some(small[*numbers.get(i)?].source.name)))?;
        self.pack_host(&small[packed..], meter)
    }

    /// Packs small tensors, in their order.
    #[cfg(not(feature = "cuda"))]
    fn pack_small(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        self.pack_host(small, meter)
    }
}
