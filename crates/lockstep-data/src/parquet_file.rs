//! Reads one text column of a Parquet file; each row is a document.
//!
//! The `parquet` crate reads the file, with decompressors in pure Rust for every codec but Zstandard. A Zstandard
//! column is read as if it were uncompressed, and `ruzstd` decompresses its pages here.

use std::{fs::File, io::Read, path::Path, sync::Arc};

use parquet::{
    basic::{CompressionCodec, Type},
    column::{
        page::{Page, PageMetadata, PageReader},
        reader::{ColumnReaderImpl, get_typed_column_reader},
    },
    data_type::{ByteArray, ByteArrayType},
    errors::ParquetError,
    file::{
        metadata::{ColumnChunkMetaData, ParquetMetaData},
        reader::FileReader,
        serialized_reader::{SerializedFileReader, SerializedPageReader},
    },
    schema::types::ColumnDescPtr,
};

use crate::{
    error::{DataError, Result},
    quiet,
};

/// Rows per decoding step.
const BATCH_ROWS: usize = 1024;

/// Maximum size of a decompressed page, in bytes. A larger page is treated as an attack.
const LARGEST_PAGE_BYTES: u64 = 1 << 30;

/// Sends the column `text_field` of the file at `path` to `sink`, from row `start` on: the text of each row, and the number
/// of the next row. Null rows are skipped. Fields of structs are named with dots.
pub(crate) fn read_parquet(
    path: &Path,
    text_field: &str,
    start: u64,
    sink: &mut impl FnMut(String, u64) -> Result<()>,
) -> Result<()> {
    let bad = |problem| DataError::BadParquet { path: path.to_owned(), problem };
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let file = Arc::new(file);
    let metadata = caught(|| read_metadata(&file)).map_err(bad)?;
    let column = text_column(&metadata, text_field).map_err(bad)?;
    let descriptor = metadata.file_metadata().schema_descr().column(column);
    let mut row = 0;
    for group in metadata.row_groups() {
        let rows = u64::try_from(group.num_rows()).map_err(|e| bad(e.to_string()))?;
        if row + rows <= start {
            row += rows;
            continue;
        }
        let mut reader =
            caught(|| column_reader(&file, group.column(column), &descriptor, rows)).map_err(bad)?;
        let group_end = row + rows;
        while row < group_end {
            let texts = caught(|| read_batch(&mut reader, &descriptor, group_end - row)).map_err(bad)?;
            if texts.is_empty() {
                return Err(bad(format!("{} rows are missing after row {row}", group_end - row)));
            }
            for text in texts {
                row += 1;
                let Some(text) = text.filter(|_| row > start) else { continue };
                let text = String::from_utf8(text.data().to_vec());
                let text = text.map_err(|_| bad(format!("row {row} of \"{text_field}\" is not UTF-8")))?;
                sink(text, row)?;
            }
        }
    }
    Ok(())
}

/// Reads all texts of a column into memory.
///
/// # Errors
/// If the file cannot be opened or is not a valid Parquet file with that text column.
pub fn read_text_column(path: &Path, column: &str) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    read_parquet(path, column, 0, &mut |text, _| {
        texts.push(text);
        Ok(())
    })?;
    Ok(texts)
}

/// Runs `call` and turns its errors and panics into a message. The `parquet` crate panics on some damaged files.
fn caught<T>(call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match quiet::caught(call) {
        Some(result) => result.map_err(|error| match error {
            // The messages of other variants start with their kind: "Parquet error: ...".
            ParquetError::General(problem) | ParquetError::EOF(problem) => problem,
            error => error.to_string(),
        }),
        None => Err("its contents contradict one another".to_owned()),
    }
}

fn read_metadata(file: &File) -> Result<ParquetMetaData, ParquetError> {
    Ok(SerializedFileReader::new(file.try_clone()?)?.metadata().clone())
}

/// Returns the index of the column that holds the text.
fn text_column(metadata: &ParquetMetaData, name: &str) -> Result<usize, String> {
    let columns = metadata.file_metadata().schema_descr().columns();
    let names = || columns.iter().take(8).map(|column| column.path().string()).collect::<Vec<_>>().join(", ");
    let found = columns.iter().position(|column| column.path().string() == name);
    let index = found.ok_or_else(|| {
        format!(
            "it has no column \"{name}\" (it has: {}); data.text_field names the one that holds the text",
            names()
        )
    })?;
    let column = &columns[index];
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        return Err(format!("its column \"{name}\" holds no text (the columns: {})", names()));
    }
    Ok(index)
}

fn column_reader(
    file: &Arc<File>,
    chunk: &ColumnChunkMetaData,
    descriptor: &ColumnDescPtr,
    rows: u64,
) -> Result<ColumnReaderImpl<ByteArrayType>, ParquetError> {
    let pages: Box<dyn PageReader> = if chunk.compression_codec() == CompressionCodec::ZSTD {
        let as_it_is =
            chunk.clone().into_builder().set_compression_codec(CompressionCodec::UNCOMPRESSED).build()?;
        Box::new(ZstdPages(SerializedPageReader::new(Arc::clone(file), &as_it_is, rows as usize, None)?))
    } else {
        Box::new(SerializedPageReader::new(Arc::clone(file), chunk, rows as usize, None)?)
    };
    Ok(get_typed_column_reader(parquet::column::reader::get_column_reader(Arc::clone(descriptor), pages)))
}

/// Reads the next rows, at most `rows` of them; `None` stands for null.
fn read_batch(
    reader: &mut ColumnReaderImpl<ByteArrayType>,
    descriptor: &ColumnDescPtr,
    rows: u64,
) -> Result<Vec<Option<ByteArray>>, ParquetError> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let rows = rows.min(BATCH_ROWS as u64) as usize;
    let (records, _, _) = reader.read_records(rows, Some(&mut levels), None, &mut values)?;
    let mut values = values.into_iter();
    if descriptor.max_def_level() == 0 {
        return Ok(values.map(Some).collect());
    }
    let is_there = |level: i16| level == descriptor.max_def_level();
    Ok(levels
        .into_iter()
        .take(records)
        .map(|level| if is_there(level) { values.next() } else { None })
        .collect())
}

/// Page reader that decompresses the pages of another reader, which passes them on unchanged.
struct ZstdPages<R>(R);

impl<R: PageReader> PageReader for ZstdPages<R> {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let Some(mut page) = self.0.get_next_page()? else { return Ok(None) };
        match &mut page {
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => {
                *buf = decompress(&[], buf)?.into();
            }
            // The levels of a V2 page are never compressed.
            Page::DataPageV2 { buf, is_compressed, def_levels_byte_len, rep_levels_byte_len, .. } => {
                let levels = (*def_levels_byte_len as usize).saturating_add(*rep_levels_byte_len as usize);
                let parts = buf.split_at_checked(levels);
                let (levels, compressed) =
                    parts.ok_or_else(|| ParquetError::EOF("a page is shorter than its levels".to_owned()))?;
                if *is_compressed {
                    *buf = decompress(levels, compressed)?.into();
                    *is_compressed = false;
                }
            }
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.0.skip_next_page()
    }
}

impl<R: PageReader> Iterator for ZstdPages<R> {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

/// Returns `start` followed by the decompressed contents of `compressed`.
fn decompress(start: &[u8], compressed: &[u8]) -> Result<Vec<u8>, ParquetError> {
    let mut bytes = start.to_vec();
    if compressed.is_empty() {
        return Ok(bytes);
    }
    let failed = |what: String| ParquetError::General(format!("a page cannot be decompressed: {what}"));
    let decoder = ruzstd::decoding::StreamingDecoder::new(compressed).map_err(|e| failed(e.to_string()))?;
    let read =
        decoder.take(LARGEST_PAGE_BYTES + 1).read_to_end(&mut bytes).map_err(|e| failed(e.to_string()))?;
    if read as u64 > LARGEST_PAGE_BYTES {
        return Err(failed(format!("it holds more than {LARGEST_PAGE_BYTES} bytes")));
    }
    Ok(bytes)
}
