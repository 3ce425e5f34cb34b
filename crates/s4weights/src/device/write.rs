//! Writing tensors that lie in device memory.

use std::sync::Mutex;

use rayon::prelude::*;
use s4_engine::cuda::{CudaEngine, DeviceMemory, DeviceTensor};
use s4_engine::{Preset, Scratch, TensorPlan};
use s4_format::DType;

use super::Failure;
use crate::error::{At, Result};
use crate::options::{Meter, thread_count};
use crate::output::check_groups;
use crate::pack::SMALL;
use crate::parallel::pool;
use crate::pipeline::{ChunkOf, Coded};
use crate::writer::{TensorSource, Writer};

/// Bytes of values that are copied to the host at a time: of one tensor at least.
const FETCHED: u64 = 256 << 20;
/// Bytes of one copy.
const PIECE: u64 = 1 << 20;

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

/// A tensor that is registered.
struct Registered<'a> {
    number: usize,
    group: u8,
    source: DeviceSource<'a>,
}

impl Writer {
    /// Writes tensors of CUDA devices, as [`Writer::write_grouped`] writes those of the host: the same
    /// bytes. Values are encoded where they are. Calls of both kinds may follow each other. Tensors are
    /// stored by themselves, also where there is a parent. (Preset `nvcomp` splits values on the host:
    /// they are copied there first, and their planes come back to be coded.)
    ///
    /// # Errors
    /// As [`Writer::write_grouped`]; `Device`.
    pub fn write_device(
        &mut self,
        engine: &CudaEngine,
        tensors: &[DeviceSource<'_>],
        groups: &[u8],
    ) -> Result<()> {
        check_groups(groups, tensors.len())?;
        if self.options.preset == Preset::Nvcomp {
            return self.write_fetched(engine, tensors, groups);
        }
        let total = tensors.iter().map(|t| t.memory.bytes()).sum();
        let callback = self.options.progress.clone();
        let mut meter = Meter { callback, done: 0, total };
        let (mut small, mut large) = (vec![], vec![]);
        for (i, &source) in tensors.iter().enumerate() {
            let number = self.next_number();
            let DeviceSource { name, dtype, shape, memory } = source;
            let values = self.register(name, dtype, shape, memory.bytes())?;
            let group = groups.get(i).copied().unwrap_or(0);
            let list = if values < SMALL { &mut small } else { &mut large };
            list.push(Registered { number, group, source });
        }
        self.pack_small(engine, &small, &mut meter)?;
        self.write_large(engine, &large, &mut meter)
    }

    /// Writes tensors as those of the host, some at a time.
    fn write_fetched(
        &mut self,
        engine: &CudaEngine,
        tensors: &[DeviceSource<'_>],
        groups: &[u8],
    ) -> Result<()> {
        let mut first = 0;
        while first < tensors.len() {
            let mut bytes = 0;
            let fits = tensors[first..].iter().take_while(|t| {
                let fits = bytes == 0 || bytes + t.memory.bytes() <= FETCHED;
                bytes += t.memory.bytes();
                fits
            });
            let end = first + fits.count();
            let batch = &tensors[first..end];
            let values = self.fetch_values(engine, batch)?;
            let sources = batch.iter().zip(&values).map(|(t, data)| {
                let DeviceSource { name, dtype, shape, .. } = *t;
                TensorSource { name, dtype, shape, data }
            });
            let groups = if groups.is_empty() { groups } else { &groups[first..end] };
            self.write_grouped(&sources.collect::<Vec<_>>(), groups)?;
            first = end;
        }
        Ok(())
    }

    /// The values of tensors.
    fn fetch_values(
        &self,
        engine: &CudaEngine,
        tensors: &[DeviceSource<'_>],
    ) -> Result<Vec<Vec<u8>>> {
        let (mut items, mut owners) = (vec![], vec![]);
        for (number, t) in tensors.iter().enumerate() {
            let mut done = 0;
            while done < t.memory.bytes() {
                let len = PIECE.min(t.memory.bytes() - done);
                let part = t.memory.part(done, len);
                let part =
                    part.map_err(|e| Failure::Engine(e.into()).named(&self.name, |_| None))?;
                items.push(vec![part]);
                owners.push(number);
                done += len;
            }
        }
        let mut values: Vec<Vec<u8>> = tensors.iter().map(|_| vec![]).collect();
        let done = engine.fetch::<Failure>(&items, |batch| {
            // Items come in order, so that a tensor's pieces do.
            batch.iter().for_each(|&(item, bytes)| values[owners[item]].extend_from_slice(bytes));
            Ok(())
        });
        done.map_err(|e| e.named(&self.name, |i| Some(tensors.get(*owners.get(i)?)?.name)))?;
        Ok(values)
    }

    fn pack_small(
        &mut self,
        engine: &CudaEngine,
        small: &[Registered<'_>],
        meter: &mut Meter,
    ) -> Result<()> {
        let items: Vec<_> = small.iter().map(|t| vec![t.source.memory]).collect();
        let target = self.name.clone();
        let done = engine.fetch::<Failure>(&items, |batch| {
            for &(i, bytes) in batch {
                self.pack(small[i].number, bytes, small[i].group)?;
                meter.add(bytes.len() as u64)?;
            }
            Ok(())
        });
        done.map_err(|e| e.named(&target, |i| Some(small.get(i)?.source.name)))
    }

    fn write_large(
        &mut self,
        engine: &CudaEngine,
        large: &[Registered<'_>],
        meter: &mut Meter,
    ) -> Result<()> {
        let tensors: Vec<_> = large.iter().map(|t| t.source.tensor()).collect();
        let target = self.name.clone();
        let named = |e: Failure| e.named(&target, |i| Some(large.get(i)?.source.name));
        let plans = self.plan_device(engine, &tensors).map_err(named)?;
        let mut coded: Vec<(Vec<_>, bool)> = large.iter().map(|_| (vec![], false)).collect();
        let done = engine.encode::<Failure>(&tensors, &plans, |frame| {
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
        });
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
    ) -> Result<Vec<TensorPlan>, Failure> {
        let threads = thread_count(self.options.threads).min(tensors.len());
        let pool = pool(threads)?;
        let idle = Mutex::new(Vec::<Scratch>::new());
        let (preset, target) = (self.options.preset, self.name.as_str());
        let plan = |&(i, sample): &(usize, &[u8])| {
            let lock = || idle.lock().unwrap_or_else(|e| e.into_inner());
            let mut scratch = lock().pop().unwrap_or_default();
            let (dtype, bytes) = (tensors[i].dtype, tensors[i].memory.bytes());
            let plan = engine.plan_sample(preset, dtype, bytes, sample, &mut scratch);
            lock().push(scratch);
            plan.at(target)
        };
        let mut plans = Vec::with_capacity(tensors.len());
        engine.samples::<Failure>(tensors, |batch| {
            let planned: Result<Vec<_>> = match &pool {
                Some(pool) => pool.install(|| batch.par_iter().map(plan).collect()),
                None => batch.iter().map(plan).collect(),
            };
            plans.extend(planned?);
            Ok(())
        })?;
        Ok(plans)
    }
}

impl<'a> DeviceSource<'a> {
    fn tensor(&self) -> DeviceTensor<'a> {
        DeviceTensor { dtype: self.dtype, shape: self.shape, memory: self.memory }
    }
}
