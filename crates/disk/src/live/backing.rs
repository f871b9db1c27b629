//! Another backing file for a disk that is in use.
//!
//! Promises: the new chain is compared with the old one wherever the top has nothing itself, so no client
//! sees another byte; only then the header names it.

use std::sync::Arc;

use ringdisk_ring::{Errno, Ring};

use super::copy::{all_of, buffer, equal, pieces};
use super::{check_lasting, offline_layer};
use crate::chain::Chain;
use crate::layer::Layer;
use crate::name::printable;
use crate::open::open_below;
use crate::{Disk, Error, ErrorKind, Format, Progress};

/// The backing file that an image shall name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// As it goes into the header: absolute, or relative to the directory of the image.
    pub file: Vec<u8>,
    /// Its format.
    pub format: Format,
}

impl Disk {
    /// Makes the top image name another backing file of the same content; `None`: no backing file,
    /// where all of it is zeroes or hidden.
    ///
    /// Errors: `Invalid` when the content differs (the message says where), `Busy`, `Cancelled`, those
    /// of opening the chain, those of the storage. The disk is as it was.
    pub async fn change_backing(
        &self,
        ring: &Ring,
        backing: Option<Backing>,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let progress = Arc::clone(progress);
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            disk.change_backing_now(&ring, backing, &progress).await
        };
        self.detached(ring, change).await
    }

    async fn change_backing_now(
        &self,
        ring: &Ring,
        backing: Option<Backing>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let turn = self.turns().enter().await;
        self.check_free()?;
        let graph = self.graph();
        let named = backing.map(|it| (it.file, Some(it.format.name().to_owned())));
        let (full, below) = match &named {
            None => (None, Vec::new()),
            Some(named) => {
                let file = printable(&named.0);
                let (full, below) = open_below(ring, self.options(), graph.top(), named.clone())
                    .await
                    .map_err(|error| error.context(format!("backing file '{file}'")))?;
                (Some(full), below)
            }
        };
        let below: Vec<Arc<Layer>> = below.into_iter().map(Arc::new).collect();
        // The turn keeps every change of the graph away, so only clients' writes come in between,
        // and what they write hides more of the backing file, never less.
        progress.set_total(graph.size());
        let size = graph.size();
        let mut ranges = pieces(0, size);
        let compared = all_of(|| {
            let (offset, len) = ranges.next()?;
            let (graph, below) = (&graph, &below);
            Some(async move {
                progress.check()?;
                let _pass = self.enter().await;
                let _graces = graph.graces();
                let (top, old) = (Chain(&graph.layers[..1]), graph.below(0));
                same(ring, top, old, Chain(below), offset, len).await?;
                progress.add_done(len);
                Ok(())
            })
        });
        compared.await.map_err(|errno| match errno {
            Errno::ILSEQ => Error::new(
                ErrorKind::Invalid,
                "the new backing file has other content than the old one, so clients would see the \
                 disk change; use `ringdisk rebase` while nobody uses the disk",
            ),
            errno => Error::os("cannot compare the backing files", errno),
        })?;
        let mut drained = self.gateway().drain(ring, turn).await;
        let graph = Arc::clone(drained.graph());
        let (mut top, result) =
            offline_layer(ring, self, &mut drained, graph.top(), async |ring, image| {
                let (file, format) = match &named {
                    Some((file, format)) => (Some(file.as_slice()), format.as_deref()),
                    None => (None, None),
                };
                image.set_backing(ring, file, format).await
            })
            .await?;
        if let Err(error) = result {
            let mut layers = graph.layers.clone();
            layers[0] = Arc::new(top);
            self.put(&mut drained, graph.with_layers(layers), false);
            return Err(error);
        }
        top.full_backing_name = full;
        let mut layers = vec![Arc::new(top)];
        layers.extend(below);
        self.put(&mut drained, graph.with_layers(layers), false);
        Ok(())
    }
}

impl Disk {
    /// Writes another backing file into the header of the top image; nothing is opened or compared, and the
    /// disk goes on with the layers that it has. For jobs.
    pub(crate) async fn set_backing_name(
        &self,
        ring: &Ring,
        backing: Option<&Backing>,
    ) -> Result<(), Error> {
        let mut drained = self.change(ring).await?;
        self.offline(ring, &mut drained, false, async |ring, image| {
            let file = backing.map(|backing| backing.file.as_slice());
            image.set_backing(ring, file, backing.map(|backing| backing.format.name())).await
        })
        .await
    }
}

/// Compares two chains where `top` has nothing. Past its end a chain reads as zeroes.
///
/// Errors: EILSEQ where they differ; those of the storage.
async fn same(
    ring: &Ring,
    top: Chain<'_>,
    old: Chain<'_>,
    new: Chain<'_>,
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    use ringdisk_qcow2::Below;
    let end = offset + len;
    let mut at = offset;
    let (a, b) = (buffer(len), buffer(len));
    while at < end {
        let (status, _) = top.status(ring, at, end - at).await?;
        if status.len == 0 {
            break;
        }
        let run = status.len;
        if !status.present && (old.has_data(at, run) || new.has_data(at, run)) {
            // Not longer than the piece.
            let piece = usize::try_from(run).map_or(a.len(), |run| run.min(a.len()));
            let (a, b) = (a.slice(0..piece), b.slice(0..piece));
            old.read(ring, at, &a).await?;
            new.read(ring, at, &b).await?;
            if !equal(&a, &b) {
                return Err(Errno::ILSEQ);
            }
        }
        at += run;
    }
    Ok(())
}
