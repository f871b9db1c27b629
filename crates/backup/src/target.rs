//! Targets of mirrors and backups: what it takes outside of the server.
//!
//! Promises: a target is made and opened with the rights of the user who asks, before the server,
//! which may be in a sandbox, is told of it; a file that is there is overwritten only where the
//! user says so.

use std::fs;
use std::path::{Path, PathBuf};

use ringdisk_daemon::control::client::Client;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::terminal::visible;
use ringdisk_disk::name::{FileName, is_export};
use ringdisk_disk::{Disk, Format, ImageOptions, Source};
use ringdisk_images::inspect;
use ringdisk_images::new_image::{Described, NewImage};
use ringdisk_ring::Runtime;
use ringdisk_storage::{NbdAddress, NbdEndpoint, NbdServer, Storage};
use serde_json::Value;

/// What the user names.
#[derive(Debug)]
pub struct Named<'a> {
    /// A file, a device, or the address of an export.
    pub to: &'a Path,
    /// `None`: it is looked at.
    pub format: Option<Format>,
    /// One that is there is overwritten.
    pub existing: bool,
    /// What is not copied.
    pub rest: Rest,
}

/// Where the target has that from which is not copied to it.
#[derive(Clone, Copy, Debug)]
pub enum Rest {
    /// Everything is copied.
    Nothing,
    /// From the image below the one on top, which is its backing file.
    Below,
    /// It has it already, for this reason.
    There(&'static str),
}

/// What the server is told of.
#[derive(Debug)]
pub struct Target {
    /// Whole name, or address.
    pub name: String,
    /// `None`: it is looked at.
    pub format: Option<Format>,
    /// It is raw, and keeps no note of that.
    pub protect_raw: bool,
}

/// Makes a target, or looks at the one that is there.
///
/// * `stats`: of the disk.
/// * `fresh`: gets a file that was made.
///
/// Errors: it is none for this disk; it is there, and is not to be overwritten; the user may not
/// write it; no such host.
pub fn prepare(
    client: &Client,
    wanted: &Named<'_>,
    stats: &Value,
    fresh: &NewFiles,
) -> Result<Target, Failure> {
    match is_export(wanted.to) {
        true => {
            let name = export(wanted.to)?;
            Ok(Target { name, format: wanted.format, protect_raw: false })
        }
        false => file(client, wanted, stats, fresh),
    }
}

/// The address of an export, as the server can use it: a server in a sandbox looks up no names, and
/// has another directory.
///
/// Errors: no address; no such host.
fn export(to: &Path) -> Result<String, Failure> {
    let name = FileName::of_user(to)?;
    let Some(address) = &name.nbd else {
        return Err(Failure::new(Exit::Usage, "this is no address of an NBD export"));
    };
    let cannot = |error: std::io::Error| {
        let doing = format!("cannot find the server of '{}'", visible(&to.to_string_lossy()));
        Failure::system(doing, &error, Exit::Usage)
    };
    let endpoints = address.server.look_up().map_err(cannot)?;
    let server = match (endpoints.first(), &address.tls) {
        // The name is what the certificate of the server has.
        (_, Some(_)) => return Ok(address.to_string()),
        (Some(NbdEndpoint::Unix(path)), None) => NbdServer::Unix(path.clone()),
        (Some(NbdEndpoint::Tcp(at)), None) => NbdServer::Tcp(at.ip().to_string(), at.port()),
        (None, None) => return Err(Failure::new(Exit::Usage, "the host has no address")),
    };
    let address = NbdAddress::new(server, address.export.clone());
    let address = address.map_err(|why| Failure::new(Exit::Usage, why.to_string()))?;
    Ok(address.to_string())
}

/// Makes a file, or looks at the one that is there.
///
/// * `stats`: of the disk.
///
/// Errors: it is an image of the disk; it is there, and is not to be overwritten; the user may not
/// write it.
fn file(
    client: &Client,
    wanted: &Named<'_>,
    stats: &Value,
    fresh: &NewFiles,
) -> Result<Target, Failure> {
    let to = wanted.to;
    let shown = visible(&to.to_string_lossy());
    let chain = chain(client, stats);
    let mut runtime = inspect::runtime()?;
    let format = match fs::metadata(to) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Some(make(&mut runtime, wanted, stats, &chain, fresh)?)
        }
        Err(error) => {
            let doing = format!("cannot use '{shown}'");
            return Err(Failure::system(doing, &error, Exit::Permission));
        }
        Ok(meta) => {
            let id = Storage::identity_of(&meta);
            let identity =
                |path: &PathBuf| path.metadata().ok().map(|it| Storage::identity_of(&it));
            if let Some(at) = chain.iter().position(|path| identity(path) == Some(id)) {
                let what = match at {
                    0 => "the image of the disk itself",
                    _ => "an image of the chain of the disk",
                };
                return Err(Failure::new(Exit::Usage, format!("'{shown}' is {what}"))
                    .hint("name another file, device or export"));
            }
            if meta.is_dir() {
                let text = format!("'{shown}' is a directory");
                return Err(Failure::new(Exit::Usage, text).hint("name a file in it"));
            }
            if !wanted.existing {
                let text = format!("'{shown}' is there already, and is not overwritten");
                let hint = match wanted.rest {
                    Rest::There(_) => "--existing: what is copied replaces what it holds there",
                    _ => "give another name; or --existing, and what it holds is lost",
                };
                return Err(Failure::new(Exit::Usage, text).hint(hint));
            }
            wanted.format
        }
    };
    let whole = fs::canonicalize(to)
        .map_err(|error| Failure::system(format!("cannot find '{shown}'"), &error, Exit::Image))?;
    let (format, protect_raw) = judge(&mut runtime, &whole, format, chain)?;
    let text = whole.into_os_string().into_string();
    let bad = |_| Failure::new(Exit::Usage, format!("the name '{shown}' is not UTF-8"));
    Ok(Target { name: text.map_err(bad)?, format: Some(format), protect_raw })
}

/// The files of the disk, the one on top first.
fn chain(client: &Client, stats: &Value) -> Vec<PathBuf> {
    let layers = stats["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = layers.iter().filter_map(|layer| layer["filename"].as_str()).map(PathBuf::from);
    // A server in the foreground has the names that it was given.
    let directory = client.server().map(|pid| PathBuf::from(format!("/proc/{pid}/cwd")));
    let directory = directory.and_then(|link| fs::read_link(link).ok()).unwrap_or_default();
    names.filter(|name| !is_export(name)).map(|name| directory.join(name)).collect()
}

/// Makes a file as large as the disk. Gives its format.
fn make(
    runtime: &mut Runtime,
    wanted: &Named<'_>,
    stats: &Value,
    chain: &[PathBuf],
    fresh: &NewFiles,
) -> Result<Format, Failure> {
    let usage = |text: &str| Failure::new(Exit::Usage, text);
    check_new_name(wanted.to)?;
    let layers = stats["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let format_of = |at: usize| layers.get(at).and_then(|layer| layer["format"].as_str());
    let format = match (wanted.format, format_of(0)) {
        (Some(format), _) => format,
        (None, Some(format)) => format.parse()?,
        (None, None) => Format::Qcow2,
    };
    let Described::Image(mut new) = NewImage::parse(format, &[])? else {
        return Err(usage("no such image"));
    };
    match (wanted.rest, chain.get(1), format_of(1)) {
        (Rest::There(why), ..) => {
            return Err(usage(&format!("{why}, and there is no such file"))
                .hint("name one that has it, with --existing; or have everything copied"));
        }
        (Rest::Below, Some(_), _) if format == Format::Raw => {
            return Err(usage("a raw image cannot have the images below the one on top below it")
                .hint("leave --sync out, or name --format qcow2"));
        }
        (Rest::Below, Some(below), Some(format)) => {
            new.set("backing_file", &below.to_string_lossy())?;
            new.set("backing_fmt", format)?;
        }
        _ => {}
    }
    let size = stats["size"].as_u64().unwrap_or(0);
    let ring = runtime.ring().clone();
    runtime.block_on(new.make(&ring, wanted.to, size, fresh))?;
    Ok(format)
}

/// Opens a file as the server will, with the rights of the user, and notes what the server may not
/// note: that it is raw, and which files it names. Gives its format, and whether it is a raw one
/// that keeps no note.
///
/// * `below`: files that it may have below it.
///
/// Errors: why it cannot be opened; a raw one was not called so.
fn judge(
    runtime: &mut Runtime,
    path: &Path,
    format: Option<Format>,
    below: Vec<PathBuf>,
) -> Result<(Format, bool), Failure> {
    let ring = runtime.ring().clone();
    let options = ImageOptions {
        format,
        ask_for_raw: true,
        note_names: true,
        known_paths: below.into_iter().filter(|path| path.exists()).collect(),
        ..ImageOptions::default()
    };
    let source = Source::Path(path.to_owned());
    let disk = runtime.block_on(Disk::open(&ring, source, &options))?;
    let found = disk.layers().first().and_then(|top| top.format());
    let format = format.or(found).unwrap_or(Format::Raw);
    let is_protected = format == Format::Raw && disk.protects_raw();
    inspect::close(runtime, &disk, path, Ok(()))?;
    Ok((format, is_protected))
}
