//! Writing tensors that lie in device memory through the host, for presets that encode there.

use s4_engine::cuda::CudaEngine;

use super::Failure;
use super::write::{Place, PlacedSource};
use crate::error::Result;
use crate::writer::{TensorSource, Writer};

/// Bytes of values that are copied to the host at a time: of one tensor at least.
const FETCHED: u64 = 256 << 20;
/// Bytes of one copy.
const PIECE: u64 = 1 << 20;

impl Writer {
    /// Writes tensors as those of the host, some at a time.
    pub(super) fn write_fetched(
        &mut self,
        engine: &CudaEngine,
        tensors: &[PlacedSource<'_>],
        groups: &[u8],
    ) -> Result<()> {
        let mut first = 0;
        while first < tensors.len() {
            let mut bytes = 0;
            let fits = tensors[first..].iter().take_while(|t| {
                let fits = bytes == 0 || bytes + t.place.bytes() <= FETCHED;
                bytes += t.place.bytes();
                fits
            });
            let end = first + fits.count();
            let batch = &tensors[first..end];
            let values = self.fetch_values(engine, batch)?;
            let sources = batch.iter().zip(&values).map(|(t, fetched)| {
                let PlacedSource { name, dtype, shape, place } = *t;
                let data = match place {
                    Place::Host(data) => data,
                    Place::Device(_) => fetched,
                };
                TensorSource { name, dtype, shape, data }
            });
            let groups = if groups.is_empty() { groups } else { &groups[first..end] };
            self.write_grouped(&sources.collect::<Vec<_>>(), groups)?;
            first = end;
        }
        Ok(())
    }

    /// The values of the tensors that lie on devices; nothing for the others.
    fn fetch_values(
        &self,
        engine: &CudaEngine,
        tensors: &[PlacedSource<'_>],
    ) -> Result<Vec<Vec<u8>>> {
        let (mut items, mut owners) = (vec![], vec![]);
        for (number, t) in tensors.iter().enumerate() {
            let Some(memory) = t.place.memory() else { continue };
            let mut done = 0;
            while done < memory.bytes() {
                let len = PIECE.min(memory.bytes() - done);
                let part = memory.part(done, len);
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
}
