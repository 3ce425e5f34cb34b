//! Writing tensors, wherever their values are.

use std::collections::{HashMap, HashSet};

use s4_engine::{Preset, TensorValues, Values};
use s4_format::DType;

use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::inputs::Failure;
use crate::options::Meter;
use crate::output::MAX_GROUPS;
use crate::pack::SMALL;
use crate::pipeline::Run;
use crate::rounded::{self, Wider, wider_copies};
use crate::writer::Writer;

/// A tensor to be written.
#[derive(Debug, Clone, Copy)]
pub struct TensorSource<'a> {
    /// Unique in the file, not empty.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements. Those in the memory of a device need [`crate::WriteOptions::engine`].
    pub values: Values<'a>,
    /// Below 4. In objects, tensors of different groups lie in different objects, so that weights (0) can
    /// be read, or kept, without the optimizer's state (1).
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

    fn is_on_device(&self) -> bool {
        self.values.memory().is_some()
    }
}

/// A tensor that is registered.
struct Registered<'a> {
    number: usize,
    source: TensorSource<'a>,
}

impl Writer {
    /// Writes tensors; several calls may follow each other. Values on devices are encoded where they are,
    /// to the bytes that the same values of the host become: as deltas, too, for which the parent's values
    /// are uploaded.
    ///
    /// # Errors
    /// `Argument` for a name that is empty or taken, for values that do not have the shape's size or are
    /// on a device while there is no engine for devices, and for a group of 4 or more; `Io` if the target
    /// fails, `Cancelled`, `Device`, and what reading the parent returns. After an error the checkpoint
    /// cannot be finished.
    pub fn write(&mut self, tensors: &[TensorSource<'_>]) -> Result<()> {
        tensors.iter().try_for_each(|t| self.check(t))?;
        let total = tensors.iter().map(|t| t.values.bytes()).sum();
        let callback = self.options.progress.clone();
        let mut meter = Meter { callback, done: 0, total };
        // Tensors on devices that are not encoded yet.
        let mut awaited = tensors.iter().filter(|t| t.is_on_device()).count();
        self.tell_staged(awaited);
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
        let mut encoded = |writer: &Self, list: &[Registered<'_>]| {
            let count = list.iter().filter(|t| t.source.is_on_device()).count();
            awaited -= count;
            if count > 0 {
                writer.tell_staged(awaited);
            }
        };
        encoded(self, &small);
        for run in large.chunk_by(|a, b| a.source.is_on_device() == b.source.is_on_device()) {
            self.write_large(run, &mut meter)?;
            encoded(self, run);
        }
        Ok(())
    }

    fn check(&self, tensor: &TensorSource<'_>) -> Result<()> {
        let TensorSource { name, group, .. } = tensor;
        if *group >= MAX_GROUPS {
            return Err(Error::Argument(format!("tensor `{name}` of group {group}")));
        }
        if tensor.is_on_device() && !self.options.has_engine() {
            let what = format!("tensor `{name}` is on a device, without an engine");
            return Err(Error::Argument(what));
        }
        Ok(())
    }

    /// Tells the caller, once no tensor on a device is awaited any more, that their values are not needed.
    fn tell_staged(&self, awaited: usize) {
        if let Some(staged) = self.options.staged.as_ref().filter(|_| awaited == 0) {
            staged();
        }
    }

    /// Packs small tensors of the host, in their order.
    fn pack_host(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        for t in small {
            if let Values::Host(data) = t.source.values {
                self.pack(t.number, data, t.source.group)?;
                meter.add(data.len() as u64)?;
            }
        }
        Ok(())
    }

    /// Writes tensors with chunks of their own, all of the host or all of devices: first those that others are rounded
    /// copies of.
    fn write_large(&mut self, large: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        let roles = self.roles.clone();
        let mut all = Vec::with_capacity(large.len());
        for Registered { source, number } in large {
            let TensorSource { dtype, shape, values, .. } = *source;
            let role = roles.as_ref().and_then(|r| r.of(*number));
            all.push(TensorValues { dtype, shape, values, role });
        }
        let wider = match self.options.rounded_copies && self.options.preset != Preset::Fast {
            true => wider_copies(&all),
            false => vec![None; all.len()],
        };
        let (copies, others): (Vec<_>, Vec<_>) =
            (0..large.len()).partition(|i| wider[*i].is_some() && self.may_have_input());
        let mut run = Run::default();
        for &i in &others {
            let TensorSource { name, dtype, shape, .. } = large[i].source;
            let parent = self.parent_of(name, dtype, shape);
            run.push(&large[i].source, all[i], parent);
        }
        let coded = self.encode(&run, meter)?;
        // What was stored of the tensors that others are copies of.
        let inputs: HashSet<_> = copies.iter().filter_map(|i| wider[*i]).collect();
        let mut stored = HashMap::new();
        for (&i, coded) in others.iter().zip(coded) {
            if inputs.contains(&i) {
                stored.insert(i, coded.records.clone());
            }
            self.close_tensor(large[i].number, coded)?;
        }
        let (mut run, mut plans, mut inputs) = (Run::default(), vec![], vec![]);
        for &i in &copies {
            let Some((wide, Values::Host(values))) = wider[i].map(|w| (w, all[w].values)) else {
                continue;
            };
            run.push(&large[i].source, all[i], None);
            // A tensor table has at most 2^22 records.
            plans.push(rounded::plan(all[i].dtype, large[wide].number as u32));
            let records = stored.get(&wide).map_or(&[][..], Vec::as_slice);
            inputs.push(Wider { values, dtype: all[wide].dtype, records });
        }
        let coded = self.encode_copies(&run, plans, inputs, meter)?;
        for (&i, coded) in copies.iter().zip(coded) {
            self.close_tensor(large[i].number, coded)?;
        }
        Ok(())
    }

    /// Packs small tensors, in their order.
    #[cfg(feature = "cuda")]
    fn pack_small(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        let Some(engine) = self.options.engine.clone() else { return self.pack_host(small, meter) };
        let there = |(i, t): (usize, &Registered<'_>)| Some((i, vec![t.source.values.memory()?]));
        let (numbers, items): (Vec<_>, Vec<_>) = small.iter().enumerate().filter_map(there).unzip();
        let target = self.name.clone();
        let mut packed = 0;
        let done = engine.fetch::<Failure>(&items, |batch| {
            for &(i, bytes) in batch {
                // Between two that are fetched there are none but the host's.
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
