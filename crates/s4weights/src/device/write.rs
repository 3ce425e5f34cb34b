//! Writing tensors that lie in device memory.

use std::collections::HashMap;

use rayon::ThreadPool;
use s4_engine::cuda::{CudaEngine, DeviceFrame, DeviceMemory, DeviceTensor, Planners};
use s4_engine::{TensorPlan, TensorView};
use s4_format::DType;

use super::Failure;
use super::parents::Parents;
use crate::error::{At, Result};
use crate::options::{Meter, thread_count};
use crate::output::check_groups;
use crate::pack::SMALL;
use crate::parallel::pool;
use crate::pipeline::{ChunkOf, Coded, Large};
use crate::writer::Writer;

/// A tensor in device memory, to be written.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSource<'a> {
    /// Unique in the file, not empty.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements: row-major, little-endian, without gaps.
    pub memory: DeviceMemory,
}

/// Where a tensor's elements are: row-major, little-endian, without gaps.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// In the memory of the host.
    Host(&'a [u8]),
    /// In the memory of a device.
    Device(DeviceMemory),
}

/// A tensor of either kind, to be written.
#[derive(Debug, Clone, Copy)]
pub struct PlacedSource<'a> {
    /// Unique in the file, not empty.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements.
    pub place: Place<'a>,
}

impl Place<'_> {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(data) => data.len() as u64,
            Self::Device(memory) => memory.bytes(),
        }
    }

    pub(crate) fn memory(&self) -> Option<DeviceMemory> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => Some(*memory),
        }
    }
}

impl<'a> From<DeviceSource<'a>> for PlacedSource<'a> {
    fn from(t: DeviceSource<'a>) -> Self {
        Self { name: t.name, dtype: t.dtype, shape: t.shape, place: Place::Device(t.memory) }
    }
}

/// A tensor that is registered.
struct Registered<'a> {
    number: usize,
    group: u8,
    source: PlacedSource<'a>,
}

impl Writer {
    /// Writes tensors of CUDA devices, as [`Writer::write_grouped`] writes those of the host: the same
    /// bytes. Values are encoded where they are. Calls of both kinds may follow each other.
    ///
    /// # Errors
    /// As [`Writer::write_grouped`]; `Device`.
    pub fn write_device(
        &mut self,
        engine: &CudaEngine,
        tensors: &[DeviceSource<'_>],
        groups: &[u8],
    ) -> Result<()> {
        let tensors: Vec<_> = tensors.iter().map(|&t| t.into()).collect();
        self.write_placed(engine, &tensors, groups)
    }

    /// Writes tensors of the host and of devices: the bytes that one call of
    /// [`Writer::write_grouped`] writes for the same values in the same order. Values on devices are
    /// encoded there: as deltas, too, for which the parent's values are uploaded.
    ///
    /// # Errors
    /// As [`Writer::write_grouped`]; `Device`.
    pub fn write_placed(
        &mut self,
        engine: &CudaEngine,
        tensors: &[PlacedSource<'_>],
        groups: &[u8],
    ) -> Result<()> {
        self.write_staged(engine, tensors, groups, &mut || ())
    }

    /// As [`Writer::write_placed`], calling `staged`, once, when the values that lie on devices are not
    /// needed any more: whoever works on them may go on, while those of the host are written.
    ///
    /// # Errors
    /// As [`Writer::write_placed`].
    pub fn write_staged(
        &mut self,
        engine: &CudaEngine,
        tensors: &[PlacedSource<'_>],
        groups: &[u8],
        staged: &mut dyn FnMut(),
    ) -> Result<()> {
        check_groups(groups, tensors.len())?;
        let total = tensors.iter().map(|t| t.place.bytes()).sum();
        let callback = self.options.progress.clone();
        let mut meter = Meter { callback, done: 0, total };
        let (mut small, mut large) = (vec![], vec![]);
        for (i, &source) in tensors.iter().enumerate() {
            let number = self.next_number();
            let PlacedSource { name, dtype, shape, place } = source;
            let values = self.register(name, dtype, shape, place.bytes())?;
            let group = groups.get(i).copied().unwrap_or(0);
            let list = if values < SMALL { &mut small } else { &mut large };
            list.push(Registered { number, group, source });
        }
        self.pack_small(engine, &small, &mut meter)?;
        let side = |t: &Registered<'_>| t.source.place.memory().is_some();
        let on_devices = large.iter().rposition(side).map_or(0, |last| last + 1);
        let mut done = 0;
        if on_devices == 0 {
            staged();
        }
        for run in large.chunk_by(|a, b| side(a) == side(b)) {
            if run.first().is_some_and(side) {
                self.write_large(engine, run, &mut meter)?;
            } else {
                self.write_host(run, &mut meter)?;
            }
            done += run.len();
            if done == on_devices {
                staged();
            }
        }
        Ok(())
    }

    /// Packs small tensors, in their order.
    fn pack_small(
        &mut self,
        engine: &CudaEngine,
        small: &[Registered<'_>],
        meter: &mut Meter,
    ) -> Result<()> {
        let there = |(i, t): (usize, &Registered<'_>)| Some((i, vec![t.source.place.memory()?]));
        let (numbers, items): (Vec<_>, Vec<_>) = small.iter().enumerate().filter_map(there).unzip();
        let target = self.name.clone();
        let mut packed = 0;
        let done = engine.fetch::<Failure>(&items, |batch| {
            for &(i, bytes) in batch {
                // Between two that are fetched there are none but the host's.
                self.pack_host(&small[packed..numbers[i]], meter)?;
                let t = &small[numbers[i]];
                self.pack(t.number, bytes, t.group)?;
                meter.add(bytes.len() as u64)?;
                packed = numbers[i] + 1;
            }
            Ok(())
        });
        done.map_err(|e| e.named(&target, |i| Some(small[*numbers.get(i)?].source.name)))?;
        self.pack_host(&small[packed..], meter)
    }

    fn pack_host(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        for t in small {
            if let Place::Host(data) = t.source.place {
                self.pack(t.number, data, t.group)?;
                meter.add(data.len() as u64)?;
            }
        }
        Ok(())
    }

    fn write_host(&mut self, large: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        let roles = self.roles.clone();
        let mut list = vec![];
        for Registered { number, group, source: PlacedSource { name, dtype, shape, place } } in
            large
        {
            if let Place::Host(data) = *place {
                let (name, dtype, shape) = (*name, *dtype, *shape);
                let parent = self.parent_of(name, dtype, shape);
                let view = TensorView { dtype, shape, data };
                let role = roles.as_ref().and_then(|r| r.of(*number));
                list.push(Large { name, view, group: *group, parent, role });
            }
        }
        let items = self.encode(list, meter)?;
        for (t, item) in large.iter().zip(items) {
            self.close_tensor(t.number, item.coded())?;
        }
        Ok(())
    }

    fn write_large(
        &mut self,
        engine: &CudaEngine,
        large: &[Registered<'_>],
        meter: &mut Meter,
    ) -> Result<()> {
        let tensors: Vec<_> = large.iter().filter_map(|t| t.source.tensor()).collect();
        let target = self.name.clone();
        let named = |e: Failure| e.named(&target, |i| Some(large.get(i)?.source.name));
        let numbers: Vec<_> = (large.iter())
            .map(|t| self.parent_of(t.source.name, t.source.dtype, t.source.shape))
            .collect();
        let parent = self.options.parent.clone();
        let pool = pool(thread_count(self.options.threads))?;
        let mut parents =
            parent.as_deref().map(|p| Parents::new(p, pool.as_ref(), &tensors, &numbers));
        let plans = self.plan_device(engine, &tensors, parents.as_ref(), pool.as_ref());
        let plans = plans.map_err(named)?;
        if let Some(parents) = &mut parents {
            parents.find(&plans)?;
        }
        let mut coded: Vec<(Vec<_>, bool)> = large.iter().map(|_| (vec![], false)).collect();
        self.out.write_behind(thread_count(self.options.threads))?;
        let sink = |frame: DeviceFrame<'_>| {
            let of = ChunkOf {
                dtype: tensors[frame.tensor].dtype,
                bytes: tensors[frame.tensor].memory.bytes(),
                group: large[frame.tensor].group,
                plan: &plans[frame.tensor],
                chunk: frame.chunk,
            };
            let record = self.put_chunk(&of, &frame.encoded, frame.bytes, meter)?;
            let (records, shared) = &mut coded[frame.tensor];
            records.push(record);
            *shared |= frame.encoded.shared;
            Ok(())
        };
        let done = match &parents {
            Some(parents) => engine.encode_from::<Failure>(&tensors, &plans, parents, sink),
            None => engine.encode::<Failure>(&tensors, &plans, sink),
        };
        // What the sink says comes before what came of it.
        self.out.write_here()?;
        done.map_err(named)?;
        for ((t, plan), (records, shared)) in large.iter().zip(plans).zip(coded) {
            self.close_tensor(t.number, Coded { plan, records, shared })?;
        }
        Ok(())
    }

    /// Plans tensors on threads, from samples that are fetched in batches.
    fn plan_device(
        &self,
        engine: &CudaEngine,
        tensors: &[DeviceTensor<'_>],
        parents: Option<&Parents<'_>>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, Failure> {
        let planners = Planners::default();
        let (preset, target) = (self.options.preset, self.name.as_str());
        let mut plans = Vec::with_capacity(tensors.len());
        let differences = parents.map_or(vec![], Parents::candidates);
        engine.samples_from::<Failure>(tensors, &differences, |batch| {
            let numbers: Vec<_> = batch.iter().map(|b| b.0).collect();
            let before = match parents {
                Some(parents) => parents.samples(&numbers)?,
                None => vec![vec![]; batch.len()],
            };
            let before: HashMap<_, _> = numbers.into_iter().zip(before).collect();
            plans.extend(planners.run(pool, batch, |i, sample, scratch| {
                let plan = match parents {
                    Some(parents) => {
                        let before = before.get(&i).map_or(&[][..], Vec::as_slice);
                        parents.plan(engine, preset, i, (sample, before), scratch)
                    }
                    None => {
                        let (dtype, bytes) = (tensors[i].dtype, tensors[i].memory.bytes());
                        engine.plan_sample(preset, dtype, bytes, sample, scratch)
                    }
                };
                plan.at(target)
            })?);
            Ok(())
        })?;
        Ok(plans)
    }
}

impl<'a> PlacedSource<'a> {
    fn tensor(&self) -> Option<DeviceTensor<'a>> {
        let memory = self.place.memory()?;
        Some(DeviceTensor { dtype: self.dtype, shape: self.shape, memory })
    }
}
