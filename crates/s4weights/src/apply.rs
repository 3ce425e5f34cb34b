//! Applying a delta in place: memory that holds the parent's values gets this checkpoint's.
//!
//! No ancestor is opened or read, unless contexts come from moments that are not applied as well. The
//! checksum of every chunk's values is compared afterwards, so memory that held something else is an error
//! and never a wrong value.

use std::collections::HashSet;

use crate::error::{At, Error, Result};
use crate::parallel::thread_count;
use crate::progress::Meter;
use crate::reader::{Reader, Want};

impl Reader {
    /// As [`Reader::read_into`], for buffers that hold the tensors' values in the parent. Tensors
    /// that are not deltas are read, whatever their buffers hold.
    ///
    /// # Errors
    /// As [`Reader::read_into`]; `Argument` if a tensor is asked for twice. The buffers' content is
    /// unspecified then: some chunks may be this checkpoint's, others the parent's.
    pub fn apply_into(&self, requests: &mut [(usize, &mut [u8])]) -> Result<()> {
        let wants = self.wants(requests)?;
        self.each_once(wants.iter().map(|w| w.tensor))?;
        let mut meter = self.meter(wants.iter().map(|w| w.to.len() as u64).sum());
        let done = self.apply_all(wants, &mut meter);
        self.let_go();
        done
    }

    /// Checks requests for whole tensors, by number, with buffers of their size.
    pub(crate) fn wants<'a>(
        &self,
        requests: &'a mut [(usize, &mut [u8])],
    ) -> Result<Vec<Want<'a>>> {
        let mut wants = Vec::with_capacity(requests.len());
        for (number, to) in requests {
            let tensor = self.tensor(*number)?;
            if tensor.bytes().at(&self.name)? != to.len() as u64 {
                return Err(Error::Argument(format!(
                    "buffer of {} bytes does not fit tensor `{}` of {} {:?}",
                    to.len(),
                    tensor.name,
                    tensor.dtype,
                    tensor.shape
                )));
            }
            wants.push(Want { tensor: *number, first: 0, to });
        }
        Ok(wants)
    }

    /// Fails if a tensor is requested twice: a delta must not be applied twice.
    pub(crate) fn each_once(&self, numbers: impl Iterator<Item = usize>) -> Result<()> {
        let mut seen = HashSet::new();
        for number in numbers {
            if !seen.insert(number) {
                let what =
                    format!("{}: tensor `{}` is requested twice", self.name, self.label(number));
                return Err(Error::Argument(what));
            }
        }
        Ok(())
    }

    fn apply_all(&self, wants: Vec<Want<'_>>, meter: &mut Meter) -> Result<()> {
        let threads = thread_count(self.options.threads);
        self.prepare_applied(&wants)?;
        self.in_order(wants, |wants, given| {
            let blocks = self.blocks(&self.hosts(&wants))?;
            let mut jobs = self.jobs_beside(wants, given, &blocks)?;
            // A whole tensor consists of whole chunks; tensors of a pack are not deltas.
            jobs.iter_mut().for_each(|job| job.in_place = job.delta && job.is_whole());
            self.run(self.request_spans(jobs, threads), &blocks, meter)
        })
    }
}
