//! Whether the metadata of an image is sound, and its repair.
//!
//! Promises: counts, keys and exit codes are those of `qemu-img check`; everything that keeps the
//! check from its end is code 1.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_console::output::json_text;
use ringdisk_daemon::failure::{Cause, Exit, Failure};
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::{Cache, Format, ImageOptions};
use ringdisk_qcow2::{CheckHooks, CheckOptions, CheckReport, Qcow2, Repair};
use ringdisk_ring::Runtime;
use ringdisk_storage::Storage;
use serde_json::{Map, Value, json};

use crate::inspect;
use crate::named::{Named, Pool};
use crate::own_image::{OwnImage, file_and_format};

/// qemu-img's code for a format that has nothing to check.
const NOTHING_TO_CHECK: u8 = 63;

/// qemu-img's code for a check that did not end.
pub const FAILED: u8 = 1;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub file: PathBuf,
    /// The name of the image is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// How the page cache is used.
    pub cache: Cache,
    /// What is repaired; `None`: nothing.
    pub repair: Option<Repair>,
    /// Other programs may write the image meanwhile.
    pub force_share: bool,
    /// The result is JSON.
    pub json: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Checks, prints what it found, and gives the exit code.
///
/// Errors: with code 1: the image cannot be opened or read; 63: it is raw.
pub fn run(request: &Request, showing: Showing) -> Result<u8, Failure> {
    checked(request, showing).map_err(|failure| {
        if failure.code() == NOTHING_TO_CHECK { failure } else { failure.with_code(FAILED) }
    })
}

fn checked(request: &Request, showing: Showing) -> Result<u8, Failure> {
    let mut runtime = inspect::runtime()?;
    let named = Named::read(request.image_opts, &request.file)?;
    let asked = named.options(ImageOptions {
        format: request.format,
        read_only: request.repair.is_none(),
        cache: request.cache,
        force_share: request.force_share,
        ..ImageOptions::default()
    })?;
    let writable = request.repair.is_some();
    let (storage, format) = file_and_format(&mut runtime, &named, &asked, writable)?;
    let ring = runtime.ring().clone();
    if format != Format::Qcow2 {
        let text = format!("a {format} image has no metadata that could be checked");
        return Err(Failure::new(Exit::Unsupported, text)
            .because(Cause::NothingToCheck)
            .with_code(NOTHING_TO_CHECK));
    }
    let repair = request.repair.unwrap_or_default();
    let data = data_file(&mut runtime, request, named.path(), &storage)?;
    let operation = Operation::start("check", showing)?;
    let result = {
        let progress = operation.progress();
        let show = |done, total| {
            progress.set_total(total);
            progress.set_done(done);
        };
        let cancelled = || progress.is_cancelled();
        let hooks = CheckHooks { progress: &show, cancelled: &cancelled };
        let options = CheckOptions { repair };
        let check = ringdisk_qcow2::check(&ring, &storage, data.as_ref(), &options, hooks);
        runtime.block_on(check).map_err(Failure::from)
    };
    let report = operation.end(result, "the image is as sound as it was")?;
    report.messages.iter().for_each(|message| terminal::say_error(visible(message)));
    if report.messages_left_out > 0 {
        terminal::say_error(format_args!("... and {} more", report.messages_left_out));
    }
    if request.json {
        terminal::say(json_text(&to_json(&report, &request.file.to_string_lossy())));
    } else if !showing.quiet {
        terminal::say(human(&report).trim_end());
    }
    Ok(report.verdict().exit_code())
}

/// The external data file, where the image has one. A header that says nothing certain is for the
/// check to judge.
///
/// Errors: it cannot be opened.
fn data_file(
    runtime: &mut Runtime,
    request: &Request,
    path: &Path,
    storage: &Arc<Storage>,
) -> Result<Option<Arc<Storage>>, Failure> {
    let ring = runtime.ring().clone();
    let options = ringdisk_qcow2::OpenOptions { header_only: true, ..Default::default() };
    let opened = runtime.block_on(Qcow2::open(&ring, Arc::clone(storage), &options));
    let is_named =
        |image: &Qcow2| image.info().external_data_file && image.info().data_file.is_some();
    let Some(image) = opened.ok().filter(is_named) else {
        return Ok(None);
    };
    let how = OwnImage { format: None, writable: false, force_share: request.force_share };
    let context = |failure: Failure| failure.context("the external data file");
    how.data_file(image.info(), path, &request.pool).map(Some).map_err(context)
}

/// The keys of qemu-img, in its order; it leaves those out that are 0.
fn to_json(report: &CheckReport, file: &str) -> Value {
    let mut object = Map::new();
    let mut put = |key: &str, number: u64, always: bool| {
        if number != 0 || always {
            object.insert(key.to_owned(), json!(number));
        }
    };
    put("image-end-offset", report.image_end_offset, false);
    put("total-clusters", report.total_clusters, false);
    put("corruptions", report.corruptions, false);
    put("corruptions-fixed", report.corruptions_fixed, false);
    put("check-errors", report.check_errors, true);
    put("leaks", report.leaks, false);
    put("leaks-fixed", report.leaks_fixed, false);
    put("fragmented-clusters", report.fragmented_clusters, false);
    put("allocated-clusters", report.allocated_clusters, false);
    put("compressed-clusters", report.compressed_clusters, false);
    object.insert(String::from("filename"), json!(file));
    object.insert(String::from("format"), json!("qcow2"));
    Value::Object(object)
}

/// The lines of qemu-img.
fn human(report: &CheckReport) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = lines(report, &mut text);
    text
}

fn lines(report: &CheckReport, out: &mut String) -> std::fmt::Result {
    if report.corruptions_fixed > 0 || report.leaks_fixed > 0 {
        writeln!(
            out,
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    \
             {} corruptions\n\nDouble checking the fixed image now...",
            report.leaks_fixed, report.corruptions_fixed
        )?;
    }
    if report.is_clean() {
        writeln!(out, "No errors were found on the image.")?;
    }
    if report.corruptions > 0 {
        writeln!(
            out,
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the \
             image may corrupt it.",
            report.corruptions
        )?;
    }
    if report.leaks > 0 {
        writeln!(
            out,
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no \
             harm to data.",
            report.leaks
        )?;
    }
    if report.check_errors > 0 {
        writeln!(out, "\n{} internal errors have occurred during the check.", report.check_errors)?;
    }
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let allocated = report.allocated_clusters;
        writeln!(
            out,
            "{allocated}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            report.total_clusters,
            percent(allocated, report.total_clusters),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated),
        )?;
    }
    if report.image_end_offset > 0 {
        writeln!(out, "Image end offset: {}", report.image_end_offset)?;
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss)] // Two digits are shown.
fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_image_is_described_as_by_qemu_img() {
        let report = CheckReport {
            corruptions: 3,
            leaks: 1,
            total_clusters: 64,
            allocated_clusters: 17,
            image_end_offset: 1_441_792,
            ..CheckReport::default()
        };
        assert_eq!(
            human(&report),
            "\n3 errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n\n\
             1 leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n\
             17/64 = 26.56% allocated, 0.00% fragmented, 0.00% compressed clusters\n\
             Image end offset: 1441792\n"
        );
        let keys: Vec<String> = match to_json(&report, "l.qcow2") {
            Value::Object(object) => object.keys().cloned().collect(),
            other => panic!("{other}"),
        };
        assert_eq!(
            keys,
            [
                "image-end-offset",
                "total-clusters",
                "corruptions",
                "check-errors",
                "leaks",
                "allocated-clusters",
                "filename",
                "format"
            ]
        );
    }
}
