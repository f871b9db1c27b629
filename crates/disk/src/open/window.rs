//! The window of a disk that the options ask for: an offset and a size, or a partition.
//!
//! Promises: a window that the disk does not hold completely is refused.

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Ring;

use crate::graph::{Graph, Window};
use crate::name::printable_path;
use crate::{Cause, Disk, Error, ErrorKind, ImageOptions, partition};

impl Disk {
    /// Restricts the disk to the window that `options` ask for. For a disk that serves no client
    /// yet.
    ///
    /// Errors: `Invalid` for a window that goes past the end; those of reading the partition table.
    pub(super) async fn narrow(&self, ring: &Ring, options: &ImageOptions) -> Result<(), Error> {
        if !is_asked(options) {
            return Ok(());
        }
        let graph = self.graph();
        let name = printable_path(graph.top().name());
        let window = match options.partition {
            Some(number) => partition::find(ring, self, number, &name).await?,
            None => asked(options, graph.size(), &name)?,
        };
        let turn = self.changes().lock().await;
        let mut drained = self.gateway().drain(ring, turn).await;
        let mut graph = Graph::clone(drained.graph());
        graph.window = window;
        self.put(&mut drained, graph, false);
        Ok(())
    }
}

/// Whether options ask for less than the whole disk.
fn is_asked(options: &ImageOptions) -> bool {
    options.window_offset != 0 || options.window_size.is_some() || options.partition.is_some()
}

/// The window that the options ask for, in a disk of `size` bytes.
///
/// * `name`: of the disk, for messages.
///
/// Errors: `Invalid` when it goes past the end.
fn asked(options: &ImageOptions, size: Bytes, name: &str) -> Result<Window, Error> {
    let (start, len) = (options.window_offset, options.window_size);
    let end = GuestOffset(start).checked_add(len.unwrap_or_default());
    if end.is_some_and(|end| end.from_start() <= size) {
        return Ok(Window::new(GuestOffset(start), len));
    }
    let error = Error::new(
        ErrorKind::Invalid,
        format!(
            "the window of '{name}' (offset {start}, size {}) goes past the end of the disk at \
             {size} bytes",
            len.map_or("to the end".to_owned(), |len| len.to_string()),
        ),
    );
    let begins_behind_end = start > size.0;
    Err(error.because(
        begins_behind_end.then_some(Cause::BeginsBehindEnd { offset: start, size: size.0 }),
    ))
}
