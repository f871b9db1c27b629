//! What a new image shall be like: `-o NAME=VALUE,…` and the options beside it.
//!
//! Promises: pure until [`NewImage::make`]; an option that is not known, or has a value that no
//! image can have, is refused with what is possible. `make` leaves nothing behind when it fails and
//! never touches a file that another program uses.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::failure::{self, Cause, Exit, Failure};
use ringdisk_daemon::new_file::{NewFiles, check_new_name};
use ringdisk_daemon::size::{human_size_exact, parse_size};
use ringdisk_daemon::terminal::visible;
use ringdisk_disk::name::{FileName, is_export};
use ringdisk_disk::names_note::{Names, renew};
use ringdisk_disk::{Bytes, Format};
use ringdisk_qcow2::limits::SECTOR;
use ringdisk_qcow2::{CompressionType, CreateOptions, Preallocation};
use ringdisk_ring::Ring;
use ringdisk_storage::{NbdOptions, OpenOptions, Storage};

/// Options of qcow2 in the order of qemu-img's lines, with what they mean.
const QCOW2: [(&str, &str); 14] = [
    ("cluster_size", "<size>   - bytes of a cluster, a power of two from 512 to 2M"),
    ("extended_l2", "<on|off> - subclusters: less is copied when little is written"),
    ("preallocation", "<mode>   - off, metadata, falloc or full"),
    ("compression_type", "<type>   - how compressed clusters are compressed: zlib or zstd"),
    (
        "keep_data_file",
        "<on|off> - the data file has the contents of the disk already, and keeps them",
    ),
    ("size", "<size>   - size of the disk"),
    ("compat", "<level>  - 0.10 (or v2) for very old programs, 1.1 (or v3)"),
    ("backing_file", "<file>   - the image that this one is an overlay of"),
    ("backing_fmt", "<format> - its format"),
    ("data_file", "<file>   - a file of its own for the data, beside the image"),
    ("data_file_raw", "<on|off> - that file shall always be a valid raw image"),
    ("lazy_refcounts", "<on|off> - write reference counts late"),
    ("refcount_bits", "<number> - width of a reference count: 1, 2, 4, 8, 16, 32 or 64"),
    ("extent_size_hint", "<size>   - how much space the file system takes at once for the file"),
];

/// Options of raw.
const RAW: [(&str, &str); 3] = [
    ("size", "<size>   - size of the disk"),
    ("preallocation", "<mode>   - off, falloc or full"),
    ("extent_size_hint", "<size>   - how much space the file system takes at once for the file"),
];

/// Options that qemu-img has and this program has not.
const FOREIGN: [&str; 2] = ["encryption", "nocow"];

fn known(format: Format) -> &'static [(&'static str, &'static str)] {
    match format {
        Format::Qcow2 => &QCOW2,
        Format::Raw => &RAW,
    }
}

/// A new image, as far as it was described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// Its format.
    pub format: Format,
    /// As given, at most one value for each name.
    given: Vec<(&'static str, String)>,
}

/// What `-o` said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Described {
    /// An image.
    Image(NewImage),
    /// `-o help`: the text.
    Help(String),
}

/// Whether a new image of this name is a qcow2 when nothing else says so.
pub fn is_named_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("qcow2"))
}

fn refuse<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(Exit::Usage, text))
}

impl NewImage {
    /// Reads what `-o` says.
    ///
    /// * `texts`: values of `-o`; a later value for a name wins.
    ///
    /// Errors: an unknown name, an entry that is none.
    pub fn parse(format: Format, texts: &[String]) -> Result<Described, Failure> {
        let mut image = NewImage { format, given: Vec::new() };
        for text in texts {
            for entry in split(text) {
                if entry == "help" || entry == "?" {
                    return Ok(Described::Help(help(format)));
                }
                let Some((name, value)) = entry.split_once('=') else {
                    return refuse(format!(
                        "'{}' in the options of the image is no NAME=VALUE",
                        visible(&entry)
                    ));
                };
                image.set(name, value)?;
            }
        }
        Ok(Described::Image(image))
    }

    /// Sets one option.
    ///
    /// Errors: a name that this format has not.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let Some((name, _)) = known(self.format).iter().find(|(known, _)| *known == name) else {
            return self.unknown(name);
        };
        self.given.retain(|(given, _)| given != name);
        self.given.push((*name, value.to_owned()));
        Ok(())
    }

    fn unknown(&self, name: &str) -> Result<(), Failure> {
        let (format, shown) = (self.format, visible(name));
        if FOREIGN.contains(&name) || name.starts_with("encrypt.") {
            return Err(Failure::new(
                Exit::Unsupported,
                format!("the option '{shown}' is not supported by this version"),
            ));
        }
        let names: Vec<&str> = known(format).iter().map(|(name, _)| *name).collect();
        Err(Failure::new(Exit::Usage, format!("{format} images have no option '{shown}'"))
            .because(Cause::UnknownOption { name: shown.to_string() })
            .hint(format!("one of {}", names.join(", "))))
    }

    /// The value of an option, if it was given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.given.iter().find(|(given, _)| *given == name).map(|(_, value)| value.as_str())
    }

    /// The size, if it was given, bytes.
    ///
    /// * `argument`: the size of the command line.
    ///
    /// Errors: given twice; no size.
    pub fn size(&self, argument: Option<u64>) -> Result<Option<u64>, Failure> {
        match (self.get("size"), argument) {
            (Some(_), Some(_)) => refuse("the size is given twice; give it once"),
            (None, argument) => Ok(argument),
            (Some(text), None) => match parse_size(text) {
                Ok(size) => Ok(Some(size)),
                Err(why) => refuse(format!("size={}: {why}", visible(text))),
            },
        }
    }

    fn switch(&self, name: &str) -> Result<bool, Failure> {
        match self.get(name) {
            None | Some("off" | "no" | "false" | "n") => Ok(false),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some(other) => refuse(format!("{name}={}: write on or off", visible(other))),
        }
    }

    /// In which pieces the file system shall make space, bytes; 0: as it likes.
    ///
    /// Errors: no size, or one of 4 GiB and more.
    fn extent_size_hint(&self) -> Result<u32, Failure> {
        let Some(text) = self.get("extent_size_hint") else { return Ok(0) };
        match parse_size(text).map(u32::try_from) {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(_)) => refuse(format!("extent_size_hint={}: too large", visible(text))),
            Err(why) => refuse(format!("extent_size_hint={}: {why}", visible(text))),
        }
    }

    /// What is prepared.
    ///
    /// Errors: a mode that this format has not.
    pub fn preallocation(&self) -> Result<Preallocation, Failure> {
        let word = self.get("preallocation").unwrap_or("off");
        match (Preallocation::of_word(word), self.format) {
            (Some(mode), Format::Qcow2) => Ok(mode),
            (Some(mode), Format::Raw) if mode != Preallocation::Metadata => Ok(mode),
            (_, Format::Qcow2) => refuse(format!(
                "preallocation={}: write off, metadata, falloc or full",
                visible(word)
            )),
            (_, Format::Raw) => refuse(format!(
                "preallocation={}: write off, falloc or full; a raw image has nothing else",
                visible(word)
            )),
        }
    }

    /// For the maker of qcow2 images.
    ///
    /// * `size`: bytes.
    ///
    /// Errors: values that no image can have. Those that depend on each other are refused by the
    /// maker.
    pub fn qcow2(&self, size: u64) -> Result<CreateOptions, Failure> {
        let mut options = CreateOptions {
            size: Bytes(size),
            extended_l2: self.switch("extended_l2")?,
            data_file_raw: self.switch("data_file_raw")?,
            keep_data_file: self.switch("keep_data_file")?,
            lazy_refcounts: self.switch("lazy_refcounts")?,
            preallocation: self.preallocation()?,
            ..CreateOptions::default()
        };
        if let Some(text) = self.get("cluster_size") {
            options.cluster_size = match parse_size(text) {
                Ok(size) => Bytes(size),
                Err(why) => return refuse(format!("cluster_size={}: {why}", visible(text))),
            };
        }
        if let Some(text) = self.get("refcount_bits") {
            options.refcount_bits = match text.parse() {
                Ok(bits) => bits,
                Err(_) => {
                    return refuse(format!(
                        "refcount_bits={}: write 1, 2, 4, 8, 16, 32 or 64",
                        visible(text)
                    ));
                }
            };
        }
        options.version = match self.get("compat") {
            None | Some("1.1" | "v3") => 3,
            Some("0.10" | "v2") => 2,
            Some(other) => return refuse(format!("compat={}: write 0.10 or 1.1", visible(other))),
        };
        options.compression = match self.get("compression_type") {
            None | Some("zlib") => CompressionType::Zlib,
            Some("zstd") => CompressionType::Zstd,
            Some(other) => {
                return refuse(format!("compression_type={}: write zlib or zstd", visible(other)));
            }
        };
        options.backing_file = self.backing().map(|name| name.as_bytes().to_vec());
        options.backing_format = self.backing_format()?.map(|format| format.name().to_owned());
        options.data_file = self.get("data_file").map(|name| name.as_bytes().to_vec());
        Ok(options)
    }

    /// Name of the backing file, as it goes into the image.
    pub fn backing(&self) -> Option<&str> {
        self.get("backing_file").filter(|name| !name.is_empty())
    }

    /// Format of the backing file.
    ///
    /// Errors: a format that we do not know; a format of nothing.
    pub fn backing_format(&self) -> Result<Option<Format>, Failure> {
        let Some(text) = self.get("backing_fmt").filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        if self.backing().is_none() {
            return refuse("a format of a backing file is given, and no backing file");
        }
        Ok(Some(text.parse::<Format>()?))
    }

    /// The line that qemu-img prints when it makes the image.
    pub fn line(&self, file: &Path, size: u64) -> String {
        let mut text =
            format!("Formatting '{}', fmt={}", visible(&file.to_string_lossy()), self.format);
        let bytes = |text: &str| parse_size(text).map_or(text.to_owned(), |size| size.to_string());
        for (name, _) in known(self.format) {
            let shown = match (*name, self.get(name), self.format) {
                ("size", ..) => Some(size.to_string()),
                ("cluster_size", given, _) => Some(given.map_or(String::from("65536"), bytes)),
                ("extent_size_hint", given, _) => given.map(bytes),
                (_, Some(given), _) => Some(visible(given)),
                ("extended_l2" | "lazy_refcounts", None, _) => Some(String::from("off")),
                ("compression_type", None, _) => Some(String::from("zlib")),
                ("refcount_bits", None, _) => Some(String::from("16")),
                _ => None,
            };
            if let Some(shown) = shown {
                let _ = write!(text, " {name}={shown}");
            }
        }
        text
    }

    /// Makes the image; what was in a file of that name is lost.
    ///
    /// * `size`: of the disk, bytes.
    /// * `fresh`: takes the files that are made or overwritten; they are kept by the caller.
    ///
    /// Errors: options that do not go together, a file that another process uses, no space.
    pub async fn make(
        &self,
        ring: &Ring,
        file: &Path,
        size: u64,
        fresh: &NewFiles,
    ) -> Result<(), Failure> {
        if !is_export(file) {
            check_new_name(file)?;
        }
        match self.format {
            Format::Raw => self.make_raw(ring, file, size, fresh).await,
            Format::Qcow2 => self.make_qcow2(ring, file, size, fresh).await,
        }
    }

    async fn make_qcow2(
        &self,
        ring: &Ring,
        file: &Path,
        size: u64,
        fresh: &NewFiles,
    ) -> Result<(), Failure> {
        let options = self.qcow2(size)?;
        let size = ringdisk_qcow2::check_options(&file.to_string_lossy(), &options)?;
        let data_name = self.get("data_file").map(|name| data_path(file, name)).transpose()?;
        let storage = open_new(file, fresh)?;
        let is_kept = options.keep_data_file;
        let data = data_name
            .as_deref()
            .map(|name| match is_kept {
                true => Ok(Arc::new(Storage::open(name, &OpenOptions::default())?)),
                false => open_new(name, fresh),
            })
            .transpose()?;
        if data.as_ref().is_some_and(|data| data.identity() == storage.identity()) {
            return refuse("the data file is the image itself");
        }
        let options = CreateOptions { size, ..options };
        let hint = self.extent_size_hint()?;
        begin(fresh, file)?;
        storage.hint_extent_size(hint);
        if let Some(name) = data_name.as_ref().filter(|_| !is_kept) {
            begin(fresh, name)?;
        }
        ringdisk_qcow2::create(ring, &storage, data.as_ref(), &options).await?;
        let CreateOptions { backing_file, backing_format, data_file, .. } = &options;
        let (below, format) = (backing_file.as_deref(), backing_format.as_deref());
        renew(&storage, &Names::new(below, format, data_file.as_deref()));
        Ok(())
    }

    async fn make_raw(
        &self,
        ring: &Ring,
        file: &Path,
        size: u64,
        fresh: &NewFiles,
    ) -> Result<(), Failure> {
        use ringdisk_storage::Kind;
        let mode = self.preallocation()?.of_data();
        let size = size.next_multiple_of(SECTOR.0);
        let storage = open_new(file, fresh)?;
        let cannot = |errno: ringdisk_ring::Errno| {
            Failure::system(format!("cannot make '{}'", file.display()), &errno.into(), Exit::Image)
        };
        if storage.kind() == Kind::BlockDevice {
            // A device is as large as it is; what it holds is the disk.
            let len = storage.len();
            return if len < size {
                Err(Failure::new(
                    Exit::Image,
                    format!(
                        "the device '{}' has {} and cannot hold a disk of {}",
                        file.display(),
                        human_size_exact(len),
                        human_size_exact(size)
                    ),
                ))
            } else {
                Ok(())
            };
        }
        let hint = self.extent_size_hint()?;
        begin(fresh, file)?;
        storage.set_len(ring, 0).await.map_err(cannot)?;
        storage.hint_extent_size(hint);
        if size > 0 {
            storage.preallocate(ring, 0, size, mode).await.map_err(cannot)?;
        }
        storage.flush(ring).await.map_err(cannot)
    }
}

/// Opens a file to be filled, and makes it when it is not there.
fn open_new(path: &Path, fresh: &NewFiles) -> Result<Arc<Storage>, Failure> {
    if let Some(FileName { nbd: Some(address), .. }) = FileName::export_of(path)? {
        return Ok(Arc::new(Storage::open_nbd(&address, &NbdOptions::default())?));
    }
    fresh.file(path).map_err(|error| not_created(path, &error))?;
    Ok(Arc::new(Storage::open(path, &OpenOptions::default())?))
}

/// The failure of a file that cannot be made.
pub fn not_created(path: &Path, error: &std::io::Error) -> Failure {
    let (file, why) = (path.display().to_string(), failure::words(error));
    Failure::system(format!("cannot create '{file}'"), error, Exit::Image)
        .because(Cause::NotCreated { file, why })
}

/// From now on the old content of a file is lost.
fn begin(fresh: &NewFiles, path: &Path) -> Result<(), Failure> {
    if is_export(path) {
        return Ok(());
    }
    fresh.begin(path).map_err(|error| not_created(path, &error))
}

/// Where an external data file of `image` is: beside it, unless its name says otherwise.
fn data_path(image: &Path, name: &str) -> Result<PathBuf, Failure> {
    let parsed = FileName::parse(name.as_bytes())?;
    let is_plain = parsed.nbd.is_none() && parsed.format != Some(Format::Qcow2);
    if !is_plain || parsed.raw_offset != 0 || parsed.raw_size.is_some() {
        return refuse("a data file is a plain file or block device, used from its first byte");
    }
    Ok(image.parent().unwrap_or(Path::new("")).join(parsed.path))
}

/// The entries of a list; two commas are one that belongs to the entry.
fn split(text: &str) -> Vec<String> {
    let mut entries = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c != ',' || rest.next_if_eq(&',').is_some() {
            if let Some(entry) = entries.last_mut() {
                entry.push(c);
            }
        } else {
            entries.push(String::new());
        }
    }
    entries
}

/// Text of `-o help`.
fn help(format: Format) -> String {
    let mut text = format!("Supported {format} options:");
    for (name, meaning) in known(format) {
        let _ = write!(text, "\n  {name:<17}={meaning}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(format: Format, text: &str) -> Result<NewImage, Failure> {
        match NewImage::parse(format, &[text.to_owned()])? {
            Described::Image(image) => Ok(image),
            Described::Help(text) => panic!("help: {text}"),
        }
    }

    #[test]
    fn lists_are_split_at_single_commas() {
        assert_eq!(split("a=1,b=2"), ["a=1", "b=2"]);
        assert_eq!(split("a=x,,y,b=2"), ["a=x,y", "b=2"]);
        assert_eq!(split(""), [""]);
        assert_eq!(split("a,"), ["a", ""]);
    }

    #[test]
    fn all_options_of_qcow2_are_understood() {
        let image = parse(
            Format::Qcow2,
            "cluster_size=128k,extended_l2=on,preallocation=metadata,compression_type=zstd,\
             compat=v3,data_file=d.raw,data_file_raw=yes,lazy_refcounts=true,refcount_bits=8,\
             backing_file=b,backing_fmt=raw,size=1G",
        )
        .expect("sound");
        let options = image.qcow2(512).expect("sound");
        assert_eq!(options.cluster_size, Bytes(128 << 10));
        assert!(options.extended_l2 && options.data_file_raw && options.lazy_refcounts);
        assert_eq!(options.preallocation, Preallocation::Metadata);
        assert_eq!(options.compression, CompressionType::Zstd);
        assert_eq!((options.version, options.refcount_bits), (3, 8));
        assert_eq!(options.data_file.as_deref(), Some(&b"d.raw"[..]));
        assert_eq!(options.backing_format.as_deref(), Some("raw"));
        assert_eq!(image.size(None).expect("once"), Some(1 << 30));
        assert!(image.size(Some(5)).is_err());
    }

    #[test]
    fn rubbish_is_refused_with_what_is_possible() {
        for (text, reason) in [
            ("", "is no NAME=VALUE"),
            ("cluster_size", "is no NAME=VALUE"),
            ("foo=1", "no option 'foo'"),
            ("cluster_size=many", "cluster_size=many"),
            ("cluster_size=-1", "cannot be negative"),
            ("compat=0.9", "write 0.10 or 1.1"),
            ("compression_type=lzma", "write zlib or zstd"),
            ("lazy_refcounts=maybe", "write on or off"),
            ("refcount_bits=x", "write 1, 2, 4"),
            ("preallocation=some", "write off, metadata"),
            ("encryption=on", "not supported"),
            ("encrypt.format=luks", "not supported"),
            ("backing_fmt=raw", "no backing file"),
            ("backing_file=x,backing_fmt=vmdk", "vmdk"),
            ("a\nb=1", "a\\nb"),
        ] {
            let refused = parse(Format::Qcow2, text).and_then(|image| image.qcow2(512));
            let message = refused.expect_err(text).message().to_owned();
            assert!(message.contains(reason), "{text}: {message}");
        }
        assert!(parse(Format::Raw, "cluster_size=64k").is_err());
        assert!(
            parse(Format::Raw, "preallocation=metadata").expect("known").preallocation().is_err()
        );
    }

    #[test]
    fn the_line_is_that_of_qemu_img() {
        let plain = parse(Format::Qcow2, "compat=1.1").expect("sound");
        assert_eq!(
            plain.line(Path::new("a.qcow2"), 1 << 20),
            "Formatting 'a.qcow2', fmt=qcow2 cluster_size=65536 extended_l2=off \
             compression_type=zlib size=1048576 compat=1.1 lazy_refcounts=off refcount_bits=16"
        );
        let raw = parse(Format::Raw, "preallocation=off").expect("sound");
        assert_eq!(
            raw.line(Path::new("r"), 512),
            "Formatting 'r', fmt=raw size=512 preallocation=off"
        );
    }

    #[test]
    fn names_that_mean_something_else_are_refused() {
        for name in ["", "json:{}", "nbd://host", "file:x", "a\nb", "fd:3"] {
            assert!(check_new_name(Path::new(name)).is_err(), "{name}");
        }
        for name in ["disk.qcow2", "./a:b", "/srv/a:b", "größe", "a b"] {
            assert!(check_new_name(Path::new(name)).is_ok(), "{name}");
        }
    }

    #[test]
    fn help_lists_every_option() {
        let described = NewImage::parse(Format::Qcow2, &[String::from("help")]);
        let Ok(Described::Help(text)) = described else { panic!("no help") };
        assert!(QCOW2.iter().all(|(name, _)| text.contains(name)), "{text}");
    }
}
