//! Tensors with chunks of their own: first those that others are rounded copies of, then the copies.

use std::collections::{HashMap, HashSet};

use s4_engine::{TensorValues, Values, makes_rounded_copies};
use s4_format::ChunkRecord;

use crate::error::Result;
use crate::options::Meter;
use crate::pipeline::Run;
use crate::rounded::{self, Candidates, Wider};
use crate::write::{Awaited, Registered};
use crate::writer::Writer;

/// Bytes of a tensor that are fetched from a device at a time.
#[cfg(feature = "cuda")]
const FETCHED: u64 = 1 << 20;

/// Where values are: the number of a device, or the host.
type Place = Option<u32>;

fn place(t: &TensorValues<'_>) -> Place {
    t.values.memory().map(|m| m.ordinal())
}

/// Large tensors, and which are rounded copies.
struct Large<'a> {
    registered: &'a [Registered<'a>],
    tensors: Vec<TensorValues<'a>>,
    /// For each that is to be stored as a copy the one that it is a copy of.
    wider: Vec<Option<usize>>,
    /// The records of those that have copies, once they are written.
    stored: HashMap<usize, Vec<ChunkRecord>>,
}

impl Large<'_> {
    fn place(&self, i: usize) -> Place {
        place(&self.tensors[i])
    }

    fn place_of_wider(&self, i: usize) -> Place {
        self.wider[i].and_then(|w| self.place(w))
    }

    /// Whether the tensor that another one is a copy of has to be fetched first: it is on a device, and not on the same.
    fn is_fetched(&self, i: usize) -> bool {
        self.place_of_wider(i).is_some() && self.place_of_wider(i) != self.place(i)
    }

    /// The tensors in the order in which they are written, in runs that an engine encodes at once.
    fn runs(&self) -> Vec<Vec<usize>> {
        let (copies, others): (Vec<_>, Vec<_>) =
            (0..self.tensors.len()).partition(|i| self.wider[*i].is_some());
        let on_device = |i: usize| self.place(i).is_some();
        let runs = others.chunk_by(|a, b| on_device(*a) == on_device(*b));
        let places = |i: usize| (self.place(i), self.place_of_wider(i));
        let copies = copies.chunk_by(|a, b| places(*a) == places(*b) && !self.is_fetched(*a));
        runs.chain(copies).map(<[_]>::to_vec).collect()
    }

    /// Whether a run needs values that are on devices.
    fn needs_device(&self, run: &[usize]) -> bool {
        run.iter().any(|&i| self.place(i).is_some() || self.place_of_wider(i).is_some())
    }
}

impl Writer {
    /// Writes tensors with chunks of their own, wherever they are: in the order, and to the bytes, that they would have
    /// if all were of the host.
    pub(crate) fn write_large(
        &mut self,
        registered: &[Registered<'_>],
        awaited: &mut Awaited,
        meter: &mut Meter,
    ) -> Result<()> {
        let roles = self.roles.clone();
        let mut tensors = Vec::with_capacity(registered.len());
        for t in registered {
            let (dtype, shape, values) = (t.source.dtype, t.source.shape, t.source.values);
            let role = roles.as_ref().and_then(|r| r.of(t.number));
            tensors.push(TensorValues { dtype, shape, values, role });
        }
        let wider = self.find_copies(registered, &tensors)?;
        let mut large = Large { registered, tensors, wider, stored: HashMap::new() };
        let runs = large.runs();
        awaited.large = runs.iter().filter(|run| large.needs_device(run)).count();
        awaited.tell();
        for run in &runs {
            match large.wider[run[0]] {
                None => self.write_others(&mut large, run, meter)?,
                Some(_) => self.write_copies(&large, run, meter)?,
            }
            if large.needs_device(run) {
                awaited.large -= 1;
                awaited.tell();
            }
        }
        Ok(())
    }

    /// For each tensor the number of the one that it is to be stored as a rounded copy of.
    fn find_copies(
        &mut self,
        registered: &[Registered<'_>],
        tensors: &[TensorValues<'_>],
    ) -> Result<Vec<Option<usize>>> {
        if !makes_rounded_copies(self.options.preset) {
            return Ok(vec![None; tensors.len()]);
        }
        let candidates = Candidates::of(tensors);
        let (mut looks, mut fetched) = (HashMap::new(), vec![]);
        for (i, bytes) in candidates.looks(tensors) {
            match tensors[i].values {
                Values::Host(data) => {
                    // They lie within the tensor.
                    let parts = bytes.iter().map(|r| &data[r.start as usize..r.end as usize]);
                    looks.insert(i, parts.collect::<Vec<_>>().concat());
                }
                Values::Device(memory) => fetched.push((i, memory, bytes)),
            }
        }
        self.fetch_looks(registered, &fetched, &mut looks)?;
        let names: Vec<_> = registered.iter().map(|t| t.source.name).collect();
        let mut wider = candidates.copies(tensors, &names, looks);
        for found in wider.iter_mut().filter(|w| w.is_some()) {
            *found = found.take().filter(|_| self.may_have_input());
        }
        Ok(wider)
    }

    /// Writes tensors that are copies of none, all of the host or all of devices.
    fn write_others(
        &mut self,
        large: &mut Large<'_>,
        numbers: &[usize],
        meter: &mut Meter,
    ) -> Result<()> {
        let mut run = Run::default();
        for &i in numbers {
            let source = &large.registered[i].source;
            let parent = self.parent_of(source.name, source.dtype, source.shape);
            run.push(source, large.tensors[i], parent);
        }
        let coded = self.encode(&run, meter)?;
        let inputs: HashSet<_> = large.wider.iter().flatten().copied().collect();
        for (&i, coded) in numbers.iter().zip(coded) {
            if inputs.contains(&i) {
                large.stored.insert(i, coded.records.clone());
            }
            self.close_tensor(large.registered[i].number, coded)?;
        }
        Ok(())
    }

    /// Writes rounded copies of tensors that are written: all in one place, and all of tensors in one place.
    fn write_copies(
        &mut self,
        large: &Large<'_>,
        numbers: &[usize],
        meter: &mut Meter,
    ) -> Result<()> {
        let (mut run, mut plans, mut inputs) = (Run::default(), vec![], vec![]);
        let fetched = match numbers.first().filter(|i| large.is_fetched(**i)) {
            Some(&i) => self.fetch_wider(large, i)?,
            None => vec![],
        };
        for &i in numbers {
            let Some(wide) = large.wider[i] else { continue };
            run.push(&large.registered[i].source, large.tensors[i], None);
            // A tensor table has at most 2^22 records.
            let number = large.registered[wide].number as u32;
            plans.push(rounded::plan(large.tensors[i].dtype, number));
            let TensorValues { dtype, mut values, .. } = large.tensors[wide];
            if large.is_fetched(i) {
                values = Values::Host(&fetched);
            }
            let records = large.stored.get(&wide).map_or(&[][..], Vec::as_slice);
            inputs.push(Wider { values, dtype, records });
        }
        let coded = self.encode_copies(&run, plans, inputs, meter)?;
        for (&i, coded) in numbers.iter().zip(coded) {
            self.close_tensor(large.registered[i].number, coded)?;
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl Writer {
    /// Copies what is to be looked at of tensors of devices.
    fn fetch_looks(
        &self,
        registered: &[Registered<'_>],
        wanted: &[(usize, s4_engine::DeviceMemory, Vec<std::ops::Range<u64>>)],
        looks: &mut HashMap<usize, Vec<u8>>,
    ) -> Result<()> {
        let parts = |(_, memory, bytes): &(usize, s4_engine::DeviceMemory, Vec<_>)| {
            let part = |r: &std::ops::Range<u64>| memory.part(r.start, r.end - r.start);
            bytes.iter().map(part).collect::<std::result::Result<Vec<_>, _>>()
        };
        let items: std::result::Result<Vec<_>, _> = wanted.iter().map(parts).collect();
        let name = |i: usize| Some(registered[wanted.get(i)?.0].source.name);
        self.fetch(items, name, |i, bytes| {
            looks.insert(wanted[i].0, bytes.to_vec());
        })
    }

    /// Copies the tensor that another one is a copy of.
    fn fetch_wider(&self, large: &Large<'_>, copy: usize) -> Result<Vec<u8>> {
        let mut out = vec![];
        let wide = large.wider[copy].and_then(|w| large.tensors[w].values.memory());
        let Some(memory) = wide else { return Ok(out) };
        let parts = (0..memory.bytes()).step_by(FETCHED as usize).map(|first| {
            let len = FETCHED.min(memory.bytes() - first);
            Ok(vec![memory.part(first, len)?])
        });
        let name = |_| Some(large.registered[copy].source.name);
        self.fetch(parts.collect(), name, |_, bytes| out.extend_from_slice(bytes))?;
        Ok(out)
    }

    /// Copies items of device memory to the host, in order. Names a tensor by the number of the item.
    fn fetch<'a>(
        &self,
        items: std::result::Result<Vec<Vec<s4_engine::DeviceMemory>>, s4_engine::cuda::GpuError>,
        name: impl FnOnce(usize) -> Option<&'a str>,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        use crate::inputs::Failure;

        let Some(engine) = self.options.engine.as_ref() else { return Ok(()) };
        let done = items.map_err(Failure::Device).and_then(|items| {
            if items.is_empty() {
                return Ok(());
            }
            engine.fetch::<Failure>(&items, |batch| {
                batch.iter().for_each(|(i, bytes)| take(*i, bytes));
                Ok(())
            })
        });
        done.map_err(|e| e.named(&self.name, name))
    }
}

/// Without an engine for devices no tensor is on one.
#[cfg(not(feature = "cuda"))]
impl Writer {
    fn fetch_looks<T>(
        &self,
        _: &[Registered<'_>],
        _: &[T],
        _: &mut HashMap<usize, Vec<u8>>,
    ) -> Result<()> {
        Ok(())
    }

    fn fetch_wider(&self, _: &Large<'_>, _: usize) -> Result<Vec<u8>> {
        Ok(vec![])
    }
}
